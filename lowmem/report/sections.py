"""The sections of `report.html`."""

from __future__ import annotations

from typing import Any

from lowmem.report.charts import Chart, Series, area_chart, line_chart
from lowmem.report.facts import setting_text, strategy_rows
from lowmem.report.html import Html, esc, paragraph, section, table
from lowmem.report.read import RunRecord
from lowmem.report.scale import number
from lowmem.report.thin import Point
from lowmem.sizes import GIB, gib

_DRAWN = {"loss", "learning_rate", "grad_norm", "tokens_per_second"}
_COUNTERS = {"step", "epoch", "seconds", "tokens", "supervised_tokens", "event", "skipped"}
_BYTES = {"rss_bytes": "resident set", "gpu_allocated_bytes": "GPU, allocated", "gpu_peak_bytes": "GPU, peak so far"}
# bottom to top, with a colour each
_LAYERS = {"weights, frozen": 8, "weights, trainable": 0, "optimizer state": 2, "gradients": 1}
_ANSWERS = 12
_CHARACTERS = 1500
_ROWS = 60  # of a table that grows with the run


def curves(record: RunRecord) -> Html:
    """Loss, learning rate, gradient norm, tokens per second, and whatever else strategies have logged."""
    marks = [(float(step), "the run was resumed here") for step in record.resumed_at]
    loss = Chart("chart-loss", "Loss", "nats per token", may_be_log=True, marks=marks, empty="Nothing was logged yet.")
    evaluations = record.series("evaluate", "eval_loss")
    drawn = [line_chart(loss, [Series("train", record.series("log", "loss")), Series("eval", evaluations, 1)])]
    for key, chart, style in (
        ("learning_rate", Chart("chart-lr", "Learning rate", from_zero=True, smooth=False, marks=marks), 3),
        ("grad_norm", _gradient_norm(marks), 2),
        ("tokens_per_second", _speed(marks), 7),
    ):
        drawn.append(line_chart(chart, [Series(key.replace("_", " "), record.series("log", key), style)]))
    for index, key in enumerate(_others(record)):
        chart = Chart(f"chart-other-{index}", key.replace("_", " "), may_be_log=True, marks=marks)
        drawn.append(line_chart(chart, [Series(key, record.series("log", key), 4)]))
    remark = "" if evaluations else paragraph("No evaluation loss was measured (data.eval, training.eval_steps).")
    return section("curves", "Curves", remark, f'<div class="charts">{"".join(drawn)}</div>\n')


def _gradient_norm(marks: list[tuple[float, str]]) -> Chart:
    empty = "Not measured: it is known where gradients are clipped (training.max_grad_norm)."
    return Chart("chart-norm", "Gradient norm", "before clipping", may_be_log=True, marks=marks, empty=empty)


def _speed(marks: list[tuple[float, str]]) -> Chart:
    unit = "tokens per second, evaluations and saves included"
    return Chart("chart-speed", "Speed", unit, from_zero=True, marks=marks)


def _others(record: RunRecord) -> list[str]:
    keys = dict.fromkeys(key for line in record.lines if line["event"] == "log" for key in line)
    return [key for key in keys if key not in _DRAWN | _COUNTERS | set(_BYTES) and record.series("log", key)]


def memory(record: RunRecord) -> Html:
    """Within the measured step by category, what made up the peak, and over the run."""
    series = [
        Series(name, [(x, y / GIB) for x, y in record.series("log", key)], style)
        for (key, name), style in zip(_BYTES.items(), (6, 0, 1), strict=True)
    ]
    over_steps = Chart(
        "chart-memory", "Memory over the run", "GiB", from_zero=True, smooth=False,
        empty="No memory was logged.",
    )  # fmt: skip
    ledger = record.result.get("memory_ledger") or {}
    total = sum(ledger.values())
    rows: list[tuple[str, str, str]] = [(name, gib(size), f"{size / total:.1%}") for name, size in ledger.items()]
    peak = table("What lived at the peak of the measured step", ["category", "bytes", "share"],
                 [*rows, ("total", gib(total), "")], kind="numbers")  # fmt: skip
    drawn = _timeline(record.timeline) + line_chart(over_steps, series)
    drawn += f'<div class="card">{peak}</div>' if ledger else ""
    drawn += "".join(f'<div class="card">{_beside(part)}</div>' for part in _compared(record))
    return section("memory", "Memory", f'<div class="charts">{drawn}</div>\n')


def _compared(record: RunRecord) -> list[tuple[str, dict[str, Any]]]:
    """What was compared with a prediction: the measured step, and on a card the peaks of the whole run."""
    titles = {"step": "The measured step, measured and predicted", "run": "The run's peaks, measured and predicted"}
    return [(title, record.memory[name]) for name, title in titles.items() if name in record.memory]


def _beside(part: tuple[str, dict[str, Any]]) -> Html:
    title, facts = part
    measured, predicted = facts["measured"], facts["predicted"]
    rows = [
        (name.removesuffix("_bytes").replace("_", " "), measured.get(name, 0), predicted.get(name, 0))
        for name in [*measured, *(name for name in predicted if name not in measured)]
    ]
    if part[0].startswith("The measured"):
        rows.append(("total", facts["measured_bytes"], facts["predicted_bytes"]))
    shown = [(name, gib(m), gib(p), f"{(p - m) / m:+.2%}" if m else "-") for name, m, p in rows]
    return table(title, ["category", "measured", "predicted", "difference"], shown, kind="numbers")


def _timeline(timeline: dict[str, Any]) -> Html:
    step = f"step {timeline['step']}" if timeline else "a step"
    chart = Chart(
        "chart-step-memory", f"Live bytes within {step}, by category", "GiB", "seconds", from_zero=True,
        empty="No step was measured (the command line measures the second one, the observer MemoryLedger in Python).",
    )  # fmt: skip
    layers: dict[str, list[int]] = timeline.get("bytes", {})
    order = [name for name in _LAYERS if name in layers] + [name for name in layers if name not in _LAYERS]
    stack = [(name, [size / GIB for size in layers[name]], _LAYERS.get(name, 4)) for name in order]
    seconds, moments = timeline.get("seconds", []), timeline.get("moments", 0)
    notes = ["Every tensor storage is counted; measuring makes the step slower than others."]
    if len(seconds) < moments:
        notes.insert(0, f"The highest moment of each of {len(seconds)} stretches of time, of {moments:,} moments.")
    return area_chart(chart, seconds, stack, notes)


def answers(record: RunRecord) -> Html:
    """Held-out prompts with the answers before and after; those that changed for better or worse come first."""
    if not record.answers:
        asked = (record.settings.get("data") or {}).get("exact_match")
        why = "The answers are written when training ends." if asked else "No prompts were answered (data.exact_match)."
        return section("answers", "Answers before and after", paragraph(why))
    judged = [(a.get("before") == a.get("reference"), a.get("after") == a.get("reference")) for a in record.answers]
    words = {(False, True): "became right", (True, False): "became wrong", (False, False): "stayed wrong",
             (True, True): "stayed right"}  # fmt: skip
    counts = ", ".join(f"{judged.count(kind):,} {word}" for kind, word in words.items())
    order = _mixed([[i for i, found in enumerate(judged) if found == kind] for kind in words])[:_ANSWERS]
    shown = "".join(_answer(record.answers[i], judged[i]) for i in order)
    remark = f"Of {len(record.answers):,} held-out prompts {counts}. Shown: {len(order)} of them, some of each kind."
    return section("answers", "Answers before and after", paragraph(remark, "sub"), shown)


def _mixed(groups: list[list[int]]) -> list[int]:
    """One of each group in turn."""
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _answer(answer: dict[str, Any], judged: tuple[bool, bool]) -> str:
    marks = {"before": judged[0], "after": judged[1]}
    rows = []
    for key in ("prompt", "reference", "before", "after"):
        if answer.get(key) is not None:
            mark = f' class="{"right" if marks[key] else "wrong"}"' if key in marks and "reference" in answer else ""
            rows.append(f"<dt>{key}</dt><dd{mark}>{esc(_cut(answer[key]))}</dd>")
    return f'<div class="answer"><dl>{"".join(rows)}</dl></div>\n'


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} … ({len(text) - _CHARACTERS:,} more characters)"


def data(record: RunRecord) -> Html:
    """What became of the rows."""
    tables = []
    for split in ("train", "eval"):
        report = record.result.get(f"{split}_data")
        if report:
            rows = [(key.replace("_", " "), _fact(value)) for key, value in report.items() if value not in ({}, [])]
            tables.append(table(f"{split} rows", [], rows))
    remark = "" if tables else paragraph("The data report is written when training ends.")
    return section("data", "Data", remark, f'<div class="columns">{"".join(tables)}</div>\n')


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_fact(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_fact, value[:20])) + (f" … ({len(value) - 20:,} more)" if len(value) > 20 else "")
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else setting_text(value)


def strategies(record: RunRecord) -> Html:
    """Each strategy with its settings, and whether it is exact."""
    rows = []
    for row in strategy_rows(record):
        kind = "not known" if row.exact is None else "exact" if row.exact else "approximate"
        tag = Html(f'<span class="tag {kind.replace(" ", "-")}">{kind}</span>')
        settings = ", ".join(f"{key}: {setting_text(value)}" for key, value in row.settings.items())
        rows.append(
            [Html(f"{esc(row.name)} {tag}"), settings or "-", "added by the trainer" if row.added else row.saves or "-"]
        )
    if not rows:
        return section("strategies", "Strategies", paragraph("None."))
    caption = "Exact strategies give the weights of the plain loop, to rounding"
    return section("strategies", "Strategies", table(caption, ["strategy", "settings", "saves"], rows, "stack"))


def settings(record: RunRecord) -> Html:
    """The resolved recipe, block by block."""
    blocks = [
        table(name, [], [(key, setting_text(value)) for key, value in block.items()])
        for name, block in record.settings.items()
        if name != "strategies" and isinstance(block, dict)
    ]
    return section("settings", "Settings", f'<div class="columns">{"".join(blocks)}</div>\n')


def notices(record: RunRecord) -> Html:
    """What the run had to say."""
    found = [str(text) for text in record.result.get("notices") or []]
    items = "".join(f"<li>{esc(text)}</li>" for text in found[:_ROWS])
    left_out = paragraph(f"{len(found) - _ROWS:,} more are in result.json.") if len(found) > _ROWS else ""
    return section("notices", "Notices", f"<ul>{items}</ul>{left_out}" if found else paragraph("None."))


def checkpoints(record: RunRecord) -> Html:
    """What can be gone on from."""
    losses = dict(record.series("evaluate", "eval_loss"))
    best = next((c["best"][1] for c in reversed(record.checkpoints.values()) if c.get("best")), None)
    rows = []
    for name, facts in record.checkpoints.items():
        step = int(facts.get("step", 0))
        loss = losses.get(float(step))
        rows.append([name, f"{step:,}", number(loss), "best" if step == best else ""])
    found: list[Point] = [(line["step"], 0.0) for line in record.lines if line["event"] == "save"]
    gone = len(found) - len(rows)
    remarks = (
        [f"{gone:,} more were written and deleted since (training.save_total_limit)."] if gone > 0 and rows else []
    )
    if len(rows) > _ROWS:
        remarks.append(f"The newest {_ROWS} of {len(rows):,}.")
    body = table("In the run folder", ["checkpoint", "step", "eval loss", ""], rows[-_ROWS:], kind="numbers")
    return section(
        "checkpoints", "Checkpoints", body if rows else paragraph("None (training.save_steps)."),
        *(paragraph(text) for text in remarks),
        paragraph("The trained model lies in model/." if record.has_model else "There is no model/ yet."),
    )  # fmt: skip


def versions(record: RunRecord) -> Html:
    """What computed."""
    return section("versions", "Versions", table("Libraries and device", [], record.versions.items(), hidden=True))
