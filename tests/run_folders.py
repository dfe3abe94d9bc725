"""Run folders made by hand, and a reader that checks a page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "br", "hr", "img", "input", "link", "path"}
RECIPE = """\
model: {name_or_path: smollm2, dtype: bfloat16}
data: {train: rows.jsonl}
training: {learning_rate: 0.001, max_steps: 100, output_dir: out}
strategies:
  lora: {r: 8}
  gradient_checkpointing: {}
"""


def write_run(
    folder: Path,
    steps: int = 20,
    every: int = 1,
    recipe: str = RECIPE,
    loss: Any = lambda step: 3.0 / step,
    evaluate: int = 0,
    result: dict[str, Any] | None = None,
) -> Path:
    """A run folder with a log line every few steps; `evaluate`: steps between evaluations."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps({"lowmem": "0.1.0", "torch": "2.13.0"}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(every, steps + 1, every):
            file.write(json.dumps(log_line(step, loss(step))) + "\n")
            if evaluate and step % evaluate == 0:
                file.write(json.dumps({"event": "evaluate", "step": step, "eval_loss": 1.5}) + "\n")
    if result is not None:
        (folder / "result.json").write_text(json.dumps({"steps": steps, **result}))
    return folder


def log_line(step: int, loss: Any, seconds: float | None = None) -> dict[str, Any]:
    return {
        "event": "log",
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens": 100 * step,
        "seconds": 0.5 * step if seconds is None else seconds,
        "tokens_per_second": 200.0,
        "rss_bytes": 2**30,
    }


class Page(HTMLParser):
    """Reads a page; fails on tags that do not close, and keeps what is to be checked."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # tag, attribute, value
        self.scripts = 0
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)
        links = [value[1:] for _, key, value in self.attributes if key == "href"]
        labels = [value for _, key, value in self.attributes if key == "aria-labelledby"]
        assert {*links, *labels} <= set(self.ids)
        assert "://" not in html  # nothing is fetched from anywhere
        assert not [tag for tag, key, _ in self.attributes if key == "src" or (tag, key) == ("link", "rel")]
        assert not [key for _, key, _ in self.attributes if key.startswith("on")]
        assert self.scripts == 1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        self.ids += [value or "" for key, value in attrs if key == "id"]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text.append(" " if tag in ("td", "th", "dt", "dd", "p", "li", "h2") else "")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self) -> str:
        """What a reader sees, white space folded."""
        return " ".join("".join(self.text).split())

    def values(self, tag: str, key: str) -> list[str]:
        return [value for t, k, value in self.attributes if (t, k) == (tag, key)]
