"use strict";
// Values under the pointer; the page is complete without it. Text of a run only ever becomes textContent.
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const plot = figure.querySelector(".plot");
  const { x: [low, high], name, series } = JSON.parse(figure.dataset.hover);
  const places = [...new Set(series.flatMap(([, points]) => points.map(([x]) => x)))].sort((a, b) => a - b);
  const cursor = document.createElement("div");
  const tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  cursor.hidden = tip.hidden = true;
  plot.append(cursor, tip);
  plot.tabIndex = 0;
  plot.setAttribute("aria-roledescription", "chart; arrow keys move along it");
  tip.setAttribute("aria-live", "polite");
  let at = -1;

  const nearest = (list, x, get) => {
    let [from, to] = [0, list.length - 1];
    while (to - from > 1) {
      const middle = (from + to) >> 1;
      if (get(list[middle]) < x) from = middle; else to = middle;
    }
    return x - get(list[from]) < get(list[to]) - x ? from : to;
  };
  const shown = (value) => typeof value === "number" ? String(Number(value.toPrecision(5))) : value;
  const show = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = places[at];
    const room = (high - low) / 40;  // further away than this, a line has no value here
    const lines = [];
    for (const [label, points] of series) {
      const [px, value] = points[nearest(points, x, (point) => point[0])];
      if (Math.abs(px - x) <= room || points.length < 60) {
        lines.push(`${label}: ${shown(value)}${px === x ? "" : ` (${name} ${shown(px)})`}`);
      }
    }
    tip.textContent = [`${name} ${shown(x)}`, ...lines].join("\n");
    const share = (x - low) / (high - low);
    cursor.style.left = `${share * 100}%`;
    tip.style.left = share > 0.5 ? "auto" : `calc(${share * 100}% + 0.5rem)`;
    tip.style.right = share > 0.5 ? `calc(${(1 - share) * 100}% + 0.5rem)` : "auto";
    cursor.hidden = tip.hidden = false;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(places, low + (event.clientX - box.left) / box.width * (high - low), (x) => x));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) { show(at + move); event.preventDefault(); }
  });
}
