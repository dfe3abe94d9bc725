"""Layers in parts on two processes, alone and with parts of rows on four, give what one process gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training
from torch import nn
from torch.nn import functional
from two_processes import beside, in_processes, marked, once

from lowmem import (
    DDP,
    EMA,
    FSDP2,
    AdamW,
    AdamW8bit,
    Adapter,
    ChunkedCrossEntropy,
    ChunkedLayers,
    Compile,
    ConflictError,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PureBF16,
    Quantization,
    RetryOnOOM,
    Strategy,
    StreamedWeights,
    TensorParallel,
    TiledMLP,
    UserError,
)
from lowmem.sharded import is_part, whole

Make = Callable[[], list[Strategy]]


def make_qwen() -> nn.Module:
    """Norms of single heads, which each rank uses for its own heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, initializer_range=0.1))


def make_olmo() -> nn.Module:
    """Norms of all heads together, so what is cut is whole again outside."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return Olmo2ForCausalLM(Olmo2Config(**shape, **heads, initializer_range=0.1))


def make_opt(**config: Any) -> nn.Module:
    """Without a plan of transformers', with biases, and with a count of heads in the module."""
    from transformers import OPTConfig, OPTForCausalLM

    shape = {"vocab_size": 128, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**shape, word_embed_proj_dim=32, dropout=0.1, init_std=0.2, **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
    return model


def in_halves(model: nn.Module) -> nn.Module:
    """One process that rounds as two ranks do: each product in two halves, which are then added up."""

    def outputs(linear: nn.Linear) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            x = x.view_as(x)  # both halves' gradients are added up before those of other layers come
            return torch.cat([functional.linear(x, half) for half in linear.weight.chunk(2)], dim=-1)

        return forward

    def inputs(linear: nn.Linear) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            pairs = zip(x.chunk(2, dim=-1), linear.weight.chunk(2, dim=1), strict=True)
            first, second = (functional.linear(*pair) for pair in pairs)
            return first + second

        return forward

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            module.forward = (inputs if name.endswith(("o_proj", "down_proj")) else outputs)(module)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"qwen": make_qwen, "olmo": make_olmo, "opt": make_opt}
CASES: dict[str, Make] = {
    "plain": list,
    "gradients as they are": lambda: [AdamW(eps=1.0)],  # a wrong scale would reach the weights
    "lora": lambda: [LoRA(r=4)],
    "lora, gradients as they are": lambda: [LoRA(r=4), AdamW(eps=1.0)],
    "dropout": lambda: [
        LoRA(r=4, lora_dropout=0.3),
        GradientCheckpointing(),
        AdamW(eps=1.0),
    ],  # the places of one process
    "accumulation": lambda: [GradientAccumulation(steps=3)],
    "checkpointing": lambda: [GradientCheckpointing()],
    "packing": lambda: [Packing()],
    "chunked loss": lambda: [ChunkedCrossEntropy(chunk_size=8)],
    "ema": lambda: [EMA(decay=0.5)],
    "slices": lambda: [ChunkedLayers(chunk_size=8)],
    "tiles": lambda: [TiledMLP(tile_size=8), LoRA(r=4)],
    "in backward": lambda: [OptimizerInBackward(), AdamW(eps=1.0)],
    "bfloat16": lambda: [MixedPrecision(), AdamW(eps=1.0)],
    "float16": lambda: [MixedPrecision(dtype="float16"), AdamW(eps=1.0)],
    "qwen": lambda: [AdamW(eps=1.0), GradientAccumulation(steps=3)],
    "qwen, lora, slices": lambda: [LoRA(r=4, modules_to_save=["q_norm"]), ChunkedLayers(chunk_size=8)],
    "olmo": lambda: [AdamW(eps=1.0), GradientCheckpointing()],
    "olmo, lora": lambda: [LoRA(r=4, lora_dropout=0.3)],
    "opt": lambda: [AdamW(eps=1.0)],
    "together": lambda: [
        LoRA(r=4),
        GradientAccumulation(micro_batch_size=2),
        GradientCheckpointing(offload="cpu"),
        ChunkedLayers(chunk_size=16),
        ChunkedCrossEntropy(chunk_size=8),
        Packing(),
        EMA(decay=0.5),
    ],
}
# each is part of `together`, or near to another case
SLOW = (
    "plain", "lora, gradients as they are", "accumulation", "checkpointing", "packing", "chunked loss", "ema",
    "slices", "tiles", "in backward", "float16", "qwen, lora, slices", "olmo, lora",
)  # fmt: skip
EVERY = marked(CASES, SLOW)
ON_FOUR = ("plain", "gradients as they are", "lora", "accumulation", "qwen", "olmo", "together")
HALVES = ("bfloat16", "float16")
# In 16 bits nothing is scaled down: a norm with another last digit would change that of weights, and so their rounding.
BOUNDS = {"in backward": None, **dict.fromkeys(HALVES, 1000.0)}


def trained(engine: Make, case: str, *, halves: bool = False) -> dict[str, Any]:
    """A run: losses, norms, evaluation, the weights as they are saved, and what this rank holds."""
    make = MODELS.get(case.split(",")[0], make_llama)
    run = run_training(
        [*CASES[case](), *engine()],
        model=in_halves(make()) if halves else make(),
        rows=make_rows(11, weighted=True),
        eval_rows=make_rows(5, seed=3),
        batch_size=5,
        max_steps=5,
        max_grad_norm=BOUNDS.get(case, 0.5),
        learning_rate=1.0 if any(isinstance(s, AdamW) for s in CASES[case]()) else 1e-3,
    )
    found = {"losses": run.losses, "norms": [s["grad_norm"] for s in run.steps], "eval": [run.result["eval_loss"]]}
    with run.trainer.inference() as model:
        named = dict(model.named_parameters())
        found["weights"] = {n: whole(p).detach().float().clone().numpy() for n, p in named.items()}
        found["whole here"] = {n: p.detach().clone().numpy() for n, p in named.items() if not is_part(p)}
    held = [p.to_local() if is_part(p) else p for p in named.values()]
    return {**found, "bytes": sum(p.nbytes for p in held)}


def some_on_two(cases: list[str]) -> dict[str, Any]:
    return {case: trained(lambda: [TensorParallel()], case) for case in cases}


def some_on_four() -> dict[str, Any]:
    from held import TRIES
    from test_predicted_tensor import TWO_DIMENSIONS, live_bytes  # it takes models from here

    found = {case: trained(lambda: [TensorParallel(size=2), FSDP2()], case) for case in ON_FOUR}
    return {**found, "live bytes": [live_bytes(TWO_DIMENSIONS, 4) for _ in range(TRIES)]}


@cache
def one(case: str) -> dict[str, Any]:
    return trained(list, case, halves=case in HALVES)


@cache
def two(case: str) -> list[dict[str, Any]]:
    """Runs on two processes, which are started once for all cases, and once more for the slow ones."""
    return [rank[case] for rank in in_processes(some_on_two, beside(case, CASES, SLOW), seconds=400)]


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return in_processes(some_on_four, number=4, seconds=400)


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("losses", "norms", "eval"):
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5, err_msg=key)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", EVERY)
def test_two_processes_equal_one(case):
    for found in two(case):
        equal(found, one(case))


@pytest.mark.slow  # four processes; runs of four that go on elsewhere are tested every time
@pytest.mark.parametrize("case", ON_FOUR)
def test_parts_of_layers_and_of_rows_equal_one(four, case):
    for rank in range(4):
        equal(four[rank][case], one(case))


@pytest.mark.parametrize("case", EVERY)
def test_what_is_whole_stays_the_same_on_all_ranks(case):
    first, second = (found["whole here"] for found in two(case))
    assert any("norm" in name for name in first)
    for name, weight in first.items():
        np.testing.assert_array_equal(second[name], weight, err_msg=name)


@pytest.mark.parametrize("case", ["gradients as they are", "lora"])
def test_every_rank_holds_its_part(case):
    for found in two(case):
        assert found["bytes"] == in_parts(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gradients as they are", "lora"])
def test_every_rank_of_four_holds_its_part(four, case):
    for rank in range(4):
        assert four[rank][case]["bytes"] == pytest.approx(in_parts(case) / 2, rel=0.02)


def in_parts(case: str) -> float:
    """Bytes of the weights, of which the layers are halved."""
    found = two(case)[0]
    weights = [(n, w.nbytes) for n, w in found["weights"].items()]
    cut = {n for n, _ in weights} - found["whole here"].keys()
    assert len(cut) == (28 if case == "lora" else 14), "seven layers, and a matrix of LoRA beside each, in two blocks"
    return sum(size / 2 if name in cut else size for name, size in weights)


def test_the_weights_moved_far_beyond_the_tolerance():
    start = dict(make_llama().named_parameters())
    for case in ("plain", "gradients as they are", "bfloat16", "float16"):
        moved = max(np.abs(w - start[n].detach().numpy()).max() for n, w in one(case)["weights"].items())
        assert moved > 1e-3, case


# -- checkpoints and generation ---------------------------------------------------------------------------------------

WORLDS: dict[int, Make] = {1: list, 2: lambda: [TensorParallel()], 4: lambda: [TensorParallel(size=2), FSDP2()]}
RECIPES: dict[str, Make] = {"full": lambda: [EMA(decay=0.5)], "lora": lambda: [LoRA(r=4), EMA(decay=0.5)]}


def went_on(folder: str, origin: int | None) -> dict[str, Any]:
    """Runs of four steps that save at step 2, or that go on from where another world has saved."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    found: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        trainer = make_trainer(
            [*recipe(), *WORLDS[size]()],
            rows=make_rows(11),
            batch_size=4,
            max_steps=4,
            save_steps=2,
            output_dir=None if origin else f"{folder}/{size}/{name}",
        )
        trainer.train(resume_from=f"{folder}/{origin}/{name}/checkpoint-000002" if origin else None)
        found[name] = {n: whole(p).detach().clone().numpy() for n, p in trainer.run.trainable.items()}
        with trainer.inference() as model:
            ids = torch.tensor([[5, 17, 60, 99]])
            found[f"{name} says"] = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False).tolist()  # type: ignore[operator]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return once("folder of cut layers", lambda: tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def straight(folder) -> dict[int, dict[str, Any]]:
    """Runs without a break; in worlds of one, two and four processes."""
    runs = {size: in_processes(went_on, str(folder), None, number=size)[-1] for size in (2, 4)}
    return {1: once("whole layers", lambda: went_on(str(folder), None)), **runs}


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in RECIPES:
        assert found[f"{name} says"] == expected[f"{name} says"]
        assert found[name].keys() == expected[name].keys()
        for key in found[name]:
            np.testing.assert_allclose(found[name][key], expected[name][key], rtol=0, atol=1e-5, err_msg=key)


def test_all_worlds_end_the_same_and_say_the_same(straight):
    close(straight[2], straight[1])
    close(straight[4], straight[1])


MORE = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 2), (1, 4))]


@pytest.mark.parametrize(("origin", "size"), [(2, 1), (4, 1), *MORE])
def test_a_run_goes_on_in_another_world(folder, straight, origin, size):
    arguments = (str(folder), origin)
    found = went_on(*arguments) if size == 1 else in_processes(went_on, *arguments, number=size)[0]
    close(found, straight[1])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_result_is_a_plain_model(folder, straight, recipe, size):
    from safetensors.torch import load_file

    file = "model.safetensors" if recipe == "full" else "adapter_model.safetensors"
    alone, found = (load_file(folder / str(number) / recipe / "model" / file) for number in (1, size))
    assert alone.keys() == found.keys()
    for name in alone:
        torch.testing.assert_close(found[name], alone[name], rtol=0, atol=1e-5)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategies",
    [
        [TensorParallel(), DDP()],
        [TensorParallel(), Quantization(), LoRA()],
        [TensorParallel(), AdamW8bit()],
        [TensorParallel(), PureBF16()],
        [TensorParallel(), RetryOnOOM()],
        [TensorParallel(), Compile()],
        [TensorParallel(), StreamedWeights(), LoRA(), GradientCheckpointing()],
    ],
    ids=str,
)
def test_what_conflicts_is_declared(strategies):
    with pytest.raises(ConflictError, match="tensor_parallel"):
        make_trainer(strategies)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**shape, num_attention_heads=4, num_key_value_heads=2))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=4, n_positions=64))


def unlike() -> nn.Module:
    """A plan by names that is wrong: between the cut layers, every column looks at all others."""
    model = make_opt()
    for layer in model.model.decoder.layers:  # type: ignore[union-attr]
        layer.activation_fn = nn.Softmax(dim=-1)
    return model


REFUSED: dict[str, tuple[Make, Callable[[], nn.Module], str]] = {
    "heads": (
        list,
        lambda: make_llama(num_key_value_heads=1),
        "its 1 heads (num_key_value_heads) are not to be shared",
    ),
    "columns": (list, lambda: make_llama(intermediate_size=63), "out_features of model.layers.*.mlp.gate_proj (63)"),
    "dropout": (list, lambda: make_llama(attention_dropout=0.1), "has attention_dropout 0.1"),
    "experts": (list, mixtral, "transformers' plan has model.layers.*.mlp.experts"),
    "names": (list, gpt2, "nobody knows how to cut transformer.h.*.attn.c_attn"),
    "proof": (list, unlike, "it does not compute the same (its logits differ by"),
    "dora": (lambda: [LoRA(r=4, use_dora=True)], make_llama, "looks at whole weights; set use_dora: false"),
    "adapter": (lambda: [Adapter("IA3", target_modules=["k_proj"], feedforward_modules=[])], make_llama, "of IA3"),
    "too many": (lambda: [FSDP2()], make_llama, "fsdp_2: all 2 processes are taken (2 (tensor))"),
}


def refusals() -> dict[str, str]:
    found = {}
    for name, (others, make, _) in REFUSED.items():
        try:
            make_trainer([TensorParallel(), *others()], model=make())
        except UserError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    return in_processes(refusals)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(messages, name):
    assert REFUSED[name][2] in messages[name]
    assert "\n" not in messages[name]


def test_bad_sizes():
    with pytest.raises(UserError, match=r"tensor_parallel\.size: counts from 1"):
        TensorParallel(size=0)


def test_one_process_gets_a_notice_and_trains():
    run = run_training([TensorParallel(size=2)])
    assert any("tensor_parallel: one process, so nothing is shared" in text for text in run.result["notices"])
    assert run.losses == run_training([]).losses
