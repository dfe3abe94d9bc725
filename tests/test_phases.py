"""What a run does beside its steps allocates without data what it does with data: loading, evaluating, answering, saving."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama
from safetensors import safe_open
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
from lowmem.memory.meta import on_meta
from lowmem.memory.moments import Moment, moments
from lowmem.memory.phases import Answers, Around, files_without_data, follow, largest_batch
from lowmem.memory.predict import judge, record
from lowmem.memory.subject import Subject, model_config
from lowmem.memory.trace import Trace, keeping
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
    "raised": (llama, "auto", lambda: []),
    "cast": (llama, "float32", lambda: [LoRA()]),
    "tied": (lambda: llama(tied=True), "float32", lambda: []),
    "nf4": (llama, "auto", lambda: [Quantization(), LoRA(), AdamW8bit()]),
    "fp4 of float32": (lambda: llama().float(), "auto", lambda: [Quantization("fp4", double_quant=False), LoRA()]),
    "int8": (llama, "auto", lambda: [Quantization("int8"), LoRA()]),
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
    """The weights so far, and one in bfloat16 on its way; transformers warms the allocator up with what they will take."""
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
    with Measured() as trace:
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
    "full": lambda: [],
    "lora": lambda: [LoRA(r=4)],
    "qlora": lambda: [Quantization(), LoRA(r=4), AdamW8bit()],
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
    assert [p for p in predicted if p != "step"] == ["at rest", "forward", "backward", "evaluate", "generate", "save"]
    for phase in ("evaluate", "generate"):
        # token ids and their mask are the host's tensors on a CPU; the meta device gets copies
        assert abs(predicted[phase].bytes - real[phase].bytes) <= 0.0005 * real[phase].bytes + 2048, phase
    # on a CPU files are written from the tensors themselves
    assert abs(predicted["save"].bytes - real["save"].bytes) <= 0.0005 * real["save"].bytes
