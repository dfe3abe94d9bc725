"""What a run does beside its steps allocates without data what it does with data."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import new_process
import numpy as np
import pytest
import torch
from conftest import make_llama
from safetensors import safe_open
from test_merge import base_model, make_run
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from lowmem import (
    EMA,
    AdamW8bit,
    ChunkedCrossEntropy,
    GradientAccumulation,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PureBF16,
    Quantization,
    Strategy,
    Trainer,
    TrainingConfig,
)
from lowmem.answers import continued
from lowmem.config import DataConfig, LoadConfig, ModelConfig
from lowmem.memory.estimate import estimate
from lowmem.memory.host import PROCESS_BYTES, pinned_size, rows_bytes
from lowmem.memory.load import META, from_host, load_without_data, move_rest
from lowmem.memory.merging import merge_trace
from lowmem.memory.meta import _random_states as random_states_are_seen
from lowmem.memory.meta import on_meta
from lowmem.memory.moments import Moment, moments
from lowmem.memory.phases import Answers, Around, largest_batch
from lowmem.memory.predict import judge, record
from lowmem.memory.subject import Subject, model_config
from lowmem.memory.trace import Trace
from lowmem.merge import merge
from lowmem.ops.without_data import keeping
from lowmem.quantize import quantize
from lowmem.recipe import load_recipe
from lowmem.run import device_kind

MIB = 2**20
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 512}
LENGTHS = (32, 32)
EVALUATION = (48, 48, 48)
ANSWERS = Answers(rows=4, prompt_length=24, new_tokens=9)


def llama(**config: Any) -> Any:
    return make_llama(torch.bfloat16, **{**SHAPE, **config})


def training(**numbers: Any) -> TrainingConfig:
    given = {"batch_size": 2, "eval_batch_size": 3, "max_length": 64, "max_grad_norm": None, "shuffle": False}
    return TrainingConfig(**{**given, "max_steps": 2, **numbers})


class Measured(Trace):
    """Of a run with data; transformers' skeletons on the meta device take no memory, nor does a file that is mapped.

    Args:
        casts: weights are cast while they are read; else what is mapped are the weights.
    """

    def __init__(self, casts: bool = False) -> None:
        super().__init__("cpu")
        self.casts = casts

    def see(self, tensor: Tensor, label: str | None = None, op: Any = "given") -> int:
        mapped = self.casts and "set_.source_Storage" in str(op)
        with keeping("nowhere") if tensor.is_meta or mapped else contextlib.nullcontext():
            return super().see(tensor, label, op)


# -- loading ----------------------------------------------------------------------------------------------------------


def mixtral() -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4}
    config = MixtralConfig(**shape, vocab_size=512, num_attention_heads=4, num_key_value_heads=2)
    return MixtralForCausalLM(config).to(torch.bfloat16)


LOADS = {
    "as stored": (llama, "auto", lambda: [LoRA()]),
    "raised": (llama, "auto", list),
    "cast": (llama, "float32", lambda: [LoRA()]),
    "tied": (lambda: llama(tied=True), "float32", list),
    "nf4": (llama, "auto", lambda: [Quantization(), LoRA(), AdamW8bit()]),
    "fp4 of float32": (lambda: llama().float(), "auto", lambda: [Quantization("fp4", double_quant=False), LoRA()]),
    "nf4, cast": (llama, "float32", lambda: [Quantization(), LoRA()]),
    "int8": (llama, "auto", lambda: [Quantization("int8"), LoRA()]),
    "int8, cast": (llama, "float32", lambda: [Quantization("int8"), LoRA()]),
    "nf4 beside experts": (mixtral, "auto", lambda: [Quantization(), LoRA()]),
    "experts that are joined": (mixtral, "float32", lambda: [LoRA()]),
    "averages": (llama, "auto", lambda: [EMA(), PureBF16()]),
}


@pytest.mark.parametrize("name", LOADS)
def test_loading_peaks_where_the_real_one_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for two matrices of an adapter: peft makes one in the dtype of its layer, and without data in float32."""
    make, dtype, strategies = LOADS[name]
    make().save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype=dtype)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what threads read, no trace sees
    with Measured(casts=dtype != "auto") as trace:
        trainer = Trainer(model, [{"input_ids": [1] * 32}] * 2, training=training(), strategies=strategies())
    real = moments(trace)["load"].bytes
    subject = Subject.of_config(model_config(model), model, training(), strategies())
    predicted, built = loaded(subject, "cpu")
    matrices = 24 * 1024 if any(isinstance(s, LoRA) for s in strategies()) else 0
    assert abs(moments(predicted)["load"].bytes - real) <= 0.0005 * real + matrices
    assert {n: (p.shape, p.dtype) for n, p in built.model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in trainer.model.named_parameters()
    }


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_quantised_weights_load_as_predicted(format: Any, tmp_path: Path) -> None:
    def strategies() -> list[Strategy]:
        return [Quantization(format), LoRA()]

    llama().save_pretrained(tmp_path / "base")
    quantize(ModelConfig(str(tmp_path / "base")), tmp_path / "quantised", Quantization(format))
    model = ModelConfig(str(tmp_path / "quantised"))
    with Measured() as trace:
        trainer = Trainer(model, [{"input_ids": [1] * 32}] * 2, training=training(), strategies=strategies())
    real = moments(trace)["load"].bytes
    subject = Subject.of_config(model_config(model), model, training(), strategies())
    predicted, built = loaded(subject, "cpu")
    assert abs(moments(predicted)["load"].bytes - real) <= 0.0005 * real + 24 * 1024
    assert {n: (p.shape, p.dtype) for n, p in built.model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in trainer.model.named_parameters()
    }
    found = estimate(subject, lengths=LENGTHS)  # of a run from the base model: the same but for loading
    base = ModelConfig(str(tmp_path / "base"))
    fresh = estimate(Subject.of_config(model_config(base), base, training(), strategies()), lengths=LENGTHS)
    for phase in found.phases.keys() - {"load"}:  # but for a table of bitsandbytes, made by who quantises
        assert 0 <= fresh.phases[phase].bytes - found.phases[phase].bytes <= 1024
    assert found.phases["load"].bytes <= fresh.phases["load"].bytes


def loaded(subject: Subject, device: Any) -> tuple[Trace, Trainer]:
    """The trace of loading and building alone."""
    assert subject.load is not None
    rows = [{"input_ids": np.ones(32, np.int32)}] * 2
    with on_meta(device), Trace(device) as trace, from_host(trace):
        model = subject.load(None, subject.strategies, device)
        trainer = Trainer(model, rows, training=subject.training, strategies=list(subject.strategies))
        move_rest(trainer.model)
    return trace, trainer


def of_file(tmp_path: Path, model: Any, *strategies: Strategy, **numbers: Any) -> Subject:
    model.config.dtype = model.dtype
    model.config.save_pretrained(tmp_path)
    given = ModelConfig(str(tmp_path))
    return Subject.of_config(model_config(given), given, training(**numbers), strategies)


def test_a_card_never_holds_the_16_bit_model_while_it_is_quantised(tmp_path: Path) -> None:
    """The weights so far, and one in bfloat16 on its way; first, the allocator is warmed up with their size.

    On the host lies one weight at a time.
    """
    model = llama(vocab_size=64)
    trace, trainer = loaded(of_file(tmp_path, model, Quantization(), LoRA(r=1)), "cuda")
    whole = sum(p.nbytes for p in model.parameters())
    rest = sum(s.size for s in trace.live_at(len(trace.events) - 1))
    largest = max(p.nbytes for p in model.parameters())
    assert rest < 0.4 * whole
    assert moments(trace)["load"].bytes < rest + 1.3 * largest
    warm = trace.storages[next(number for number, _ in trace.events)]
    assert warm.op == "aten.empty.memory_format"
    assert 0.8 * rest < warm.size < rest
    assert trainer.device == META
    found = judge(trace, expandable=True)
    assert (found.host_phase, found.host_bytes) == ("load", largest)


def test_a_cast_is_made_on_the_host_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = llama()
    subject = of_file(tmp_path, model)
    subject = replace(subject, load=lambda layers, strategies, device: cast(model))
    trace, _ = loaded(subject, "cuda")
    assert judge(trace, expandable=True).host_phase == "load"
    assert judge(trace, expandable=True).host_bytes == 2 * max(p.nbytes for p in model.parameters())


def cast(model: Any) -> nn.Module:
    def make() -> Any:
        with torch.device("meta"):
            return type(model)(model.config).to(torch.bfloat16)

    return load_without_data(make, LoadConfig(None, dtype="float32", device=META))


def test_a_gguf_file_is_unpacked_on_the_host_and_quantised_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem.memory.subject.is_gguf", lambda model: True)
    model = llama()
    subject = of_file(tmp_path, model, Quantization(), LoRA(r=1))
    # what the strategy would ask transformers for does not hold for such a file
    monkeypatch.setattr("lowmem.strategies.quantization.is_gguf", lambda model: True)
    trace, trainer = loaded(subject, "cuda")
    whole = sum(p.nbytes for p in model.parameters())
    found = judge(trace, expandable=True)
    assert whole <= found.host_bytes <= 1.01 * whole
    assert found.phases["load"].bytes < 0.8 * whole
    assert all(trace.place_of(p) == "device" for p in trainer.model.parameters())


# -- after the steps --------------------------------------------------------------------------------------------------


def real_run(strategies: list[Strategy], folder: Path) -> tuple[dict[str, Moment], Trace]:
    """The same run with data, in full: every token of the answers is generated, every file is written."""
    rows = [{"input_ids": [1] * length} for length in LENGTHS]
    trainer = Trainer(llama(), rows, training=training(), strategies=strategies)
    with random_states_are_seen(), Measured() as trace:
        for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
            trace.see(tensor)
        for state in list(trainer.optimizer.state.values()):
            for value in state.values():
                if isinstance(value, Tensor):
                    trace.see(value)
        for parameter in trainer.model.parameters():
            _see_quant_state(trace, parameter)
        for strategy in strategies:
            for tensor in strategy.state_dict().get("average", {}).values():
                trace.see(tensor)
        trainer.train()
        with trace.during("evaluate"):
            trainer.evaluate([{"input_ids": [1] * length} for length in EVALUATION])
        prompts = [[1] * n for n in (ANSWERS.prompt_length, *[ANSWERS.prompt_length - 1] * (ANSWERS.rows - 1))]
        with trace.during("generate"), trainer.inference() as model:
            found = continued(model, SimpleNamespace(eos_token_id=511), prompts, ANSWERS.new_tokens)
        assert found.shape == (ANSWERS.rows, ANSWERS.new_tokens)
        with trace.during("save"):
            trainer.save_checkpoint(folder / "checkpoint-000002")
            trainer.save_model(folder / "model")
    return moments(trace), trace


def _see_quant_state(trace: Trace, parameter: Any) -> None:
    from lowmem.memory.meter import _quant_state

    for tensor in _quant_state(parameter):
        trace.see(tensor)


RUNS = {
    "full": list,
    "lora": lambda: [LoRA(r=4)],
    "qlora": lambda: [Quantization(), LoRA(r=4), AdamW8bit()],
    "int8": lambda: [Quantization("int8"), LoRA(r=4)],
    "averages": lambda: [EMA()],
    "autocast, chunked, packed": lambda: [MixedPrecision(), ChunkedCrossEntropy(chunk_size=16), Packing()],
    "16 bits, in backward": lambda: [PureBF16(), OptimizerInBackward()],
}


@pytest.mark.parametrize("name", RUNS)
def test_evaluating_answering_and_saving_peak_where_the_real_ones_do(name: str, tmp_path: Path) -> None:
    around = Around(EVALUATION, ANSWERS, checkpoints=True, result=True)
    with torch.device("meta"):
        model = llama()
    predicted = moments(record(model, training(), RUNS[name](), "cpu", LENGTHS, around=around))
    real, _ = real_run(RUNS[name](), tmp_path)
    assert list(predicted) == ["at rest", "forward", "backward", "step", "evaluate", "generate", "save"]
    for phase in ("evaluate", "generate"):
        # token ids and their mask are the host's tensors on a CPU; the meta device gets copies
        assert abs(predicted[phase].bytes - real[phase].bytes) <= 0.0005 * real[phase].bytes + 2048, phase
    # on a CPU files are written from the tensors themselves; bitsandbytes puts a weight's settings into small ones
    assert abs(predicted["save"].bytes - real["save"].bytes) <= 0.0005 * real["save"].bytes + 2048


@pytest.mark.parametrize("strategies", [list, lambda: [LoRA(r=4)]], ids=["full", "lora"])
def test_saving_from_a_card_copies_what_a_file_holds_to_the_host(strategies: Any, tmp_path: Path) -> None:
    """safetensors keeps the copies of all tensors of a file until it is written; torch.save takes one at a time."""
    trainer = Trainer(llama(), [{"input_ids": [1] * 8}] * 2, training=training(max_steps=1), strategies=strategies())
    trainer.train()
    trainer.save_model(tmp_path)
    sizes = []
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            sizes.append(sum(file.get_tensor(key).nbytes for key in file.keys()))  # noqa: SIM118 - no dict
    for around in (Around(result=True), Around(checkpoints=True)):
        with torch.device("meta"):
            model = llama()
        found = judge(record(model, training(), strategies(), "cuda", LENGTHS, around=around), expandable=True)
        assert found.host_phase == "save"
        assert 0 <= found.host_bytes - max(sizes) <= 8 * 624  # numpy's random state, beside a checkpoint's weights


def test_averages_need_a_copy_of_the_weights_while_they_are_saved() -> None:
    with torch.device("meta"):
        model = llama()
    trainable = sum(p.numel() for p in model.parameters()) * 4
    for strategies, more in ([], 0), ([EMA()], 2 * trainable):
        found = judge(
            record(model, training(), strategies, "cuda", LENGTHS, around=Around(result=True)), expandable=True
        )
        if not more:
            plain = found.phases["save"].bytes
        assert found.phases["save"].bytes - plain == pytest.approx(more, rel=1e-3)


def test_the_largest_batch_of_prompts_is_answered() -> None:
    """Batches hold prompts of like lengths; the one with most tokens counts, padding included."""

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}

    pairs = [("x" * length, "yy") for length in (3, 9, 4, 4, 20)]
    assert largest_batch(tokenizer, pairs, batch_size=2) == Answers(1, 20, 10)
    assert largest_batch(tokenizer, [*pairs, ("x" * 11, "y")], batch_size=2) == Answers(2, 20, 10)


# -- the host, and memory between it and a card -----------------------------------------------------------------------


def test_batches_are_pinned_one_ahead_in_powers_of_two() -> None:
    with torch.device("meta"):
        model = llama()
    ids = 64 * 8  # one row of int64; inputs and labels
    assert (pinned_size(ids), pinned_size(ids + 1), pinned_size(1)) == (512, 1024, 1)
    one = judge(record(model, training(batch_size=1), [], "cuda", (64,)), expandable=True)
    assert one.pinned_bytes == 2 * ids
    many = judge(record(model, training(batch_size=4), [GradientAccumulation()], "cuda", (64,) * 4), expandable=True)
    assert many.pinned_bytes == 2 * 2 * ids
    odd = judge(record(model, training(batch_size=1), [], "cuda", (33,)), expandable=True)
    assert odd.pinned_bytes == 2 * 512
    assert judge(record(model, training(batch_size=1), [], "cpu", (64,)), expandable=True).pinned_bytes == 0


def test_the_meta_device_is_taken_for_what_it_stands_for() -> None:
    assert device_kind(META) == "cpu" == device_kind(torch.device("cpu"))
    with on_meta("cuda"):
        assert device_kind(META) == "cuda"
        assert device_kind(torch.device("cpu")) == "cpu"
    assert device_kind(META) == "cpu"
    assert "pin_memory" not in vars(torch.Tensor)


def test_paged_state_is_no_memory_of_the_allocator(tmp_path: Path) -> None:
    """Tensors from 100,000 values on; a byte each per moment, 4 for embeddings. What one update touches must fit."""
    model = llama(intermediate_size=1024, vocab_size=1024)
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.numel() >= 100_000}
    moments_of = {name: 2 * size * (4 if "embed" in name else 1) for name, size in sizes.items()}
    assert len(moments_of) == 3 * 3 + 2  # of three layers, embedding and head
    found = [
        estimate(of_file(tmp_path, model, AdamW8bit(paged=paged)), lengths=LENGTHS, device=device)
        for paged, device in ((False, "cuda"), (True, "cuda"), (True, "cpu"))
    ]
    plain, paged, on_cpu = found
    assert paged.managed_bytes == sum(moments_of.values())
    assert paged.managed_at_once == max(moments_of.values())
    assert plain.phases["at rest"].bytes - paged.phases["at rest"].bytes == paged.managed_bytes
    assert paged.needed_bytes == paged.peak_reserved_bytes + paged.context_bytes + paged.managed_at_once
    assert (plain.managed_bytes, on_cpu.managed_bytes) == (0, 0)
    assert on_cpu.phases["at rest"].ledger["optimizer state"] > paged.managed_bytes


def test_an_estimate_names_every_phase_in_order(tmp_path: Path) -> None:
    subject = of_file(tmp_path, llama(), LoRA(r=4), output_dir="run", save_steps=1)
    subject = replace(subject, data=DataConfig(eval="rows.jsonl", exact_match="prompts.jsonl"), answers=ANSWERS)
    found = estimate(subject, lengths=LENGTHS)
    wanted = ["load", "at rest", "forward", "backward", "step", "evaluate", "generate", "save"]
    assert list(found.phases) == wanted
    assert found.phases[found.phase].bytes == max(moment.bytes for moment in found.phases.values())
    assert list(found.host_phases)[-2:] == ["save", "merge"]
    assert found.host_bytes == max(sum(ledger.values()) for ledger in found.host_phases.values()) > PROCESS_BYTES
    assert found.host_phases["save"]["pinned"] == found.pinned_bytes
    assert found.left_out == []
    unknown = estimate(replace(subject, answers=None), lengths=LENGTHS)
    assert "generate" not in unknown.phases
    assert "exact_match" in unknown.left_out[0]
    alone = estimate(of_file(tmp_path, llama()), lengths=LENGTHS, device="cpu", data_bytes=5 * MIB)
    assert list(alone.phases) == ["load", "at rest", "forward", "backward", "step"]
    assert alone.host_bytes == PROCESS_BYTES + 5 * MIB + max(m.bytes for m in alone.phases.values())


def test_a_long_evaluation_is_the_peak(tmp_path: Path) -> None:
    """Logits of an evaluation with many long rows can need more than a step with short ones."""
    subject = of_file(tmp_path, llama(vocab_size=4096), LoRA(r=4), eval_batch_size=16, max_length=256)
    short = estimate(subject, lengths=(16, 16))
    long = estimate(replace(subject, data=DataConfig(eval="rows.jsonl")), lengths=(16, 16))
    assert (short.phase, long.phase) == ("backward", "evaluate")
    assert long.peak_reserved_bytes > 4 * 16 * 256 * 4096 > short.peak_reserved_bytes


def test_rows_in_mapped_files_are_not_in_memory(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(4000))
    held, mapped = np.zeros(1000, np.int32), np.asarray(np.memmap(tmp_path / "rows", np.int32, mode="r"))
    columns = {"labels": held, "offsets": held[:0], "loss_weights": held[:0], "weight_offsets": held[:0]}
    assert rows_bytes(SimpleNamespace(input_ids=held, **columns)) == 8000
    assert rows_bytes(SimpleNamespace(input_ids=mapped, **columns)) == 4000


# -- merging ----------------------------------------------------------------------------------------------------------


def merge_run(folder: Path, base: Any, strategies: str, **lora: Any) -> tuple[Path, Subject]:
    run = make_run(folder, base, strategies, "auto", target_modules=TARGETS, **lora)
    return run, Subject.of(load_recipe(run / "recipe.yaml", check_files=False))


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MERGES = {
    "lora": ("{lora: {r: 4}}", {}),
    "dora": ("{lora: {r: 4, use_dora: true}}", {"use_dora": True}),
    "trained head": (
        "{lora: {r: 4, modules_to_save: [lm_head]}, mixed_precision: {}}",
        {"modules_to_save": ["lm_head"]},
    ),
    "nf4": ("{lora: {r: 4}, quantization: {}}", {}),
}


@pytest.mark.parametrize("name", MERGES)
def test_merging_peaks_where_the_real_one_does(name: str, tmp_path: Path) -> None:
    strategies, options = MERGES[name]
    model = base_model(hidden_size=128, intermediate_size=512, num_hidden_layers=4).bfloat16()
    run, subject = merge_run(tmp_path, model, strategies, **options)
    with Measured() as trace, trace.during("merge"):
        merge(run, tmp_path / "out", probe=False)
    real = trace.peak()[0]
    found = merge_trace(subject)
    assert found is not None
    # a quantised layer hangs in a cycle, and goes when the collector of Python comes by
    waiting = sum(p.numel() for p in model.model.layers[0].parameters()) if name == "nf4" else 0
    assert 0.985 * real <= found.peak()[0] <= 1.015 * real + waiting


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_merging_takes_the_memory_that_is_predicted(tmp_path: Path) -> None:
    """At most 5 % more than predicted in memory of its own (sampled), and not 5 % less with its mapped files."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of the resident set cannot be set back here")
    log = tmp_path / "log"
    assert new_process.run(measure_merging, tmp_path, log=log) == 0, log.read_text()
    predicted, grown, own = json.loads((tmp_path / "measured.json").read_text())
    assert predicted > 100 * MIB
    assert grown >= 0.95 * predicted
    assert 0.8 * predicted <= own <= 1.05 * predicted + 8 * MIB


def measure_merging(folder: Path) -> None:
    """A job: bytes predicted, growth of the resident set, and of what is not a file's."""
    shape = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = base_model(**shape, num_key_value_heads=8).bfloat16()
    run, subject = merge_run(folder, model, "{lora: {r: 4}}")
    found = merge_trace(subject)
    assert found is not None
    predicted = found.peak()[0]
    del model
    gc.collect()
    with given_back_at_once():
        Path("/proc/self/clear_refs").write_text("5")
        resident, anonymous = _resident("VmRSS"), _resident("RssAnon")
        with sampled("RssAnon") as own:
            merge(run, folder / "out", probe=False)
        most = _resident("VmHWM")
    measured = [predicted, most - resident, max(own) - anonymous]
    (folder / "measured.json").write_text(json.dumps(measured))


@contextlib.contextmanager
def sampled(name: str) -> Iterator[list[int]]:
    """Yields what that line of /proc/self/status says, in bytes, every millisecond that the block leaves to Python.

    The kernel keeps the peak of the whole resident set only; in it are pages of libraries and of mapped files, which
    come and go with the load of the machine.
    """
    seen, done = [_resident(name)], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            seen.append(_resident(name))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        done.set()
        looking.join()


@contextlib.contextmanager
def given_back_at_once() -> Iterator[None]:
    """Inside, glibc's malloc keeps no freed block of a MiB or more; it would keep those of up to 32 MiB."""
    libc, threshold = ctypes.CDLL(None), -3  # M_MMAP_THRESHOLD
    libc.malloc_trim(0)
    libc.mallopt(threshold, MIB)
    try:
        yield
    finally:
        libc.mallopt(threshold, 32 * MIB)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
