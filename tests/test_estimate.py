"""`lowmem estimate`: what it says, draws and refuses; figures in recipes; the picture's numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from lowmem import AdamW8bit, GradientAccumulation, GradientCheckpointing, LoRA, OptimizerInBackward, TrainingConfig
from lowmem.cli import app
from lowmem.cli.memory import _said_in_one_line
from lowmem.cli.memory_tables import verdict
from lowmem.config import ModelConfig
from lowmem.errors import UserError
from lowmem.memory.beside import beside_the_rule
from lowmem.memory.estimate import GIB, estimate
from lowmem.memory.step import second_step
from lowmem.memory.subject import Subject, read_subject
from lowmem.memory.trace import Trace
from lowmem.sizes import parse_size

ROOT = Path(__file__).parents[1]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = LlamaConfig(num_hidden_layers=3, vocab_size=512, dtype="float32", **SIZES)
PNG = b"\x89PNG\r\n\x1a\n"


def subject(*strategies, rows=4, length=64, vocabulary=512, layers=3, **numbers) -> Subject:
    training = TrainingConfig(batch_size=rows, max_length=length, **numbers)
    config = LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": vocabulary, "num_hidden_layers": layers})
    return Subject.of_config(config, ModelConfig("tiny"), training, strategies)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with an architecture and a recipe of it; no weights, no data."""
    (tmp_path / "tiny").mkdir()
    CONFIG.save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny.yaml").write_text(
        "model: {name_or_path: tiny}\ndata: {train: rows.jsonl}\ntraining: {batch_size: 4, max_length: 64}\n"
        "strategies:\n  quantization: {}\n  lora: {r: 4}\n  gradient_checkpointing: {}\n"
        "  gradient_accumulation: {micro_batch_size: 1}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lowmem(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    text = str(caught.value)
    assert "\n" not in text
    return text


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_facts_as_json_and_the_ledger_adds_up(folder):
    found = json.loads(lowmem("estimate", "tiny.yaml", "--gpu-memory", "512MiB", "--json"))
    assert sum(found["ledger"].values()) == found["peak_reserved_bytes"] <= found["needed_bytes"] - GIB // 2
    assert found["peak_allocated_bytes"] <= found["peak_reserved_bytes"]
    assert {"host_bytes", "pinned_bytes", "phases", "rule_of_thumb"} <= set(found)
    for phase in found["phases"].values():
        assert sum(phase["ledger"].values()) == phase["peak_bytes"] > 0
    assert found["fits"] is False
    assert found["gpu_memory_bytes"] == GIB // 2


def test_the_text_fits_100_columns_and_says_what_matters(folder):
    text = lowmem("estimate", "tiny.yaml", "--gpu-memory", "24GiB")
    lines = text.splitlines()
    hint = next(line for line in lines if line.startswith("What fits a card: lowmem plan --model "))  # has a path
    assert max(len(line) for line in lines if line != hint) <= 100
    assert text.startswith("tiny needs 0.5")
    assert "4 rows of 64 tokens per optimizer step" in text
    assert "fits, with 23." in text
    for words in (
        "predicted peak",
        "rule of thumb",
        "as the rule says",
        "not in the rule",
        "lowmem waterfall tiny.yaml",
    ):
        assert words in text, words


def test_what_is_within_the_tolerance_is_not_called_fitting():
    found = estimate(subject())
    assert verdict(found, found.needed_bytes - 1).startswith("does not fit")
    assert verdict(found, found.needed_bytes + found.needed_bytes // 60).startswith("too close to call")
    assert verdict(found, found.needed_bytes + found.needed_bytes // 40).startswith("fits")


def test_a_model_alone_is_trained_fully(folder):
    few = json.loads(lowmem("estimate", "tiny/config.json", "--seq-length", "32", "--batch-size", "2", "--json"))
    assert few["lengths"] == [32, 32]
    weights = 4 * few["rule_of_thumb"]["parameters"]
    assert few["ledger"]["weights, trainable"] == weights
    assert few["ledger"]["optimizer state"] == pytest.approx(2 * weights, rel=0.01)


def test_a_known_shape_needs_no_config_and_no_weights():
    solar = read_subject("solar-10.7b-qlora-24gb")
    assert (solar.layers, solar.vocabulary) == (48, 32000)


def test_a_kernel_from_a_package_is_foreseen_without_the_package(folder):
    sizes = [
        json.loads(lowmem("estimate", "tiny.yaml", "strategies.mixed_precision={}", *kernel, "--json"))["ledger"]
        for kernel in ([], ["model.attn_implementation=flash_attention_2"])
    ]
    assert sizes[0] == sizes[1]


def test_on_a_cpu_there_is_no_card_to_speak_of(folder):
    text = lowmem("estimate", "tiny.yaml", "--device", "cpu")
    assert "for tensors" in text.splitlines()[0]
    assert "CUDA" not in text


# -- beside the rule --------------------------------------------------------------------------------------------------


def why(*strategies, **numbers) -> dict[str, str]:
    return {row.category: row.why for row in beside_the_rule(estimate(subject(*strategies, **numbers)))}


def test_each_difference_to_the_rule_has_its_reason():
    plain = why()
    assert plain["weights"] == plain["optimizer state"] == "as the rule says"
    assert "x the rule's one hidden state per layer: all that" in plain["activations"]
    assert plain["allocator slack"].startswith("not in the rule")
    lean = why(GradientCheckpointing(), AdamW8bit(), length=512)
    assert "bytes for each trained weight, not 8" in lean["optimizer state"]
    assert not lean["activations"].endswith("all that backward passes of layers need is kept")


def test_the_columns_of_the_rule_and_of_the_prediction_add_up():
    found = estimate(subject(LoRA(r=4)))
    rows = beside_the_rule(found)
    assert sum(row.predicted_bytes for row in rows) == found.needed_bytes
    assert sum(row.rule_bytes for row in rows) == found.rule.total_bytes


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_that_nobody_knows_gets_the_nearest_name():
    assert "did you mean upstage/SOLAR-10.7B-v1.0?" in refusal("estimate", "upstage/SOLAR-10.7-v1.0")


def test_a_recipe_that_is_not_there(folder):
    assert "tiniy.yaml" in refusal("estimate", "tiniy.yaml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "tpu"], "--device: cuda or cpu; got tpu"),
        (["--gpu-memory", "24 gigs"], "--gpu-memory: a size such as 24GiB"),
        (["--gpu-memory", "24GiB", "--device", "cpu"], "--gpu-memory: has no meaning"),
        (["--plot", "a.jpg"], "--plot: a file that ends in .png"),
        (["--plot", "nowhere/a.png"], "--plot: no such folder"),
        (["strategies.lora=null"], "quantization needs something to be trainable"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(folder, options, words):
    assert words in refusal("estimate", "tiny.yaml", *options)


def test_without_matplotlib_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'lowmem[plot]'" in refusal("estimate", "tiny.yaml", "--plot", "a.png")


def test_what_looks_at_data_is_one_line_and_other_errors_stay():
    with pytest.raises(UserError, match="without data"), _said_in_one_line():
        torch.ones(2, device="meta").sum().item()
    with pytest.raises(RuntimeError, match="shape"), _said_in_one_line():
        torch.ones(2).view(3)


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("24GB", 24 * 10**9), ("7.5 gib", 15 * GIB // 2), ("1024", 1024)]
)
def test_sizes(text, size):
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "24G", "1e3GiB", "24GiBs"])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match="--x:"):
        parse_size(text, "--x")


# -- the picture ------------------------------------------------------------------------------------------------------


def test_a_picture_that_can_be_read(folder):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from lowmem.memory.step_picture import draw

    lowmem("estimate", "tiny.yaml", "--gpu-memory", "1GiB", "--plot", "step.png")
    assert (folder / "step.png").read_bytes().startswith(PNG)
    height, width, _ = imread(folder / "step.png").shape
    assert width > height > 500
    step, found = recorded(LoRA(r=4))
    draw(found, step, folder / "step.svg")
    texts = "".join(ElementTree.parse(folder / "step.svg").getroot().itertext())
    assert "tiny: memory within one optimizer step" in texts


def recorded(*strategies, **numbers) -> tuple[Trace, object]:
    trace = Trace("cuda")
    run = subject(*strategies, **numbers)
    found = estimate(run, trace=trace)
    return second_step(trace, run.vocabulary), found


def test_the_second_step_is_what_the_picture_shows():
    step, found = recorded(GradientAccumulation(micro_batch_size=1))
    assert [s.phase for s in step.stretches] == ["forward", "backward", "forward", "backward", "step"]
    assert step.stretches[0].start == 0
    assert all(a.end == b.start for a, b in zip(step.stretches, step.stretches[1:], strict=False))
    totals = [sum(sizes) for sizes in zip(*step.bytes.values(), strict=True)]
    assert max(totals) == totals[step.peak] == max(moment.bytes for moment in found.phases.values())
    state = step.bytes["optimizer state"]
    assert state[0] == state[-1] > 0
    assert step.bytes["gradients"][0] == 0 < max(step.bytes["gradients"])


def test_an_update_inside_backward_has_no_gradients_left():
    step, _ = recorded(OptimizerInBackward(), max_grad_norm=None)
    assert {s.phase for s in step.stretches} <= {"forward", "backward", "step"}
    held = max(step.bytes.get("gradients", [0]))
    assert held < 0.5 * max(step.bytes["weights, trainable"])


# -- recipes ----------------------------------------------------------------------------------------------------------


def ledgers():
    spec = importlib.util.spec_from_file_location("recipe_ledgers", ROOT / "benchmarks" / "recipe_ledgers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_in_a_recipes_comments_are_those_predicted():
    script, recipe = ledgers(), ROOT / "recipes" / "optimizer_in_backward.yaml"
    text, found = recipe.read_text(encoding="utf-8"), script.predicted(recipe)
    assert script.complaints(text, found) == []
    written = next(line for line in text.splitlines() if line.endswith("optimizer state"))
    wrong = text.replace(written, script.figure(2 * found.ledger["optimizer state"] / GIB, "optimizer state"))
    assert [line.split(":")[0] for line in script.complaints(wrong, found)] == ["optimizer state"]
    assert script.complaints("model: {}", found)


def test_a_block_is_written_once_and_replaced():
    script = ledgers()
    first = script.with_block("# what\n\nmodel: {}\n", f"{script.BEGIN}--\n# 1\n{script.END}--\n")
    assert first.startswith(f"# what\n#\n{script.BEGIN}")
    assert script.with_block(first, f"{script.BEGIN}--\n# 2\n{script.END}--\n") == first.replace("# 1\n", "# 2\n")


def test_every_recipe_has_its_block():
    script = ledgers()
    for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
        assert script.figures(recipe.read_text(encoding="utf-8").partition(script.BEGIN)[2]), recipe.name
