"""FusedKernels: what it changes, refuses and saves. Liger needs a card: a stand-in with its API takes its place.

`TRITON_INTERPRET=1 python -m pytest tests/test_fused_kernels.py -k interpreted`, where liger-kernel and triton are
installed, runs the real kernels on the CPU.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_llama
from liger_stand_in import RMSNorm, RoPE, SiLUMul, fused_kernels, package, stand_in
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem import ChunkedLayers, FusedKernels, GradientCheckpointing, LoRA, Trainer, TrainingConfig
from lowmem.errors import UserError
from lowmem.memory.meta import on_meta
from lowmem.memory.predict import record
from lowmem.memory.trace import Trace
from lowmem.ops import fused
from lowmem.ops.fused_modules import fused_norm, gated, norms, rotating
from lowmem.ops.fused_proof import prove_norm
from lowmem.run import Run

tl: Any = import_module("triton.language") if find_spec("triton") else None  # of kernels written here

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}
GATED = {**SMALL, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "mistral": {**GATED, "sliding_window": 8},
    "qwen3": {**GATED, "head_dim": 24},
    "gemma3_text": {**GATED, "head_dim": 16, "sliding_window": 8},
    "phi3": {**GATED, "num_key_value_heads": 4},
    "olmo2": GATED,
}
CPU = torch.device("cpu")


def model_of(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**MODELS[kind], **changes})).to(dtype)
    with torch.no_grad():  # norms start with all ones, or all zeros, which hides what is done with their weights
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.3)
    return model


def fuse(model: nn.Module, kernels: fused.Kernels | None = None, **fields: Any) -> nn.Module:
    strategy = fused_kernels(**fields)
    strategy._given = kernels or stand_in()
    run = Run(TrainingConfig(), CPU, frozenset())
    strategy.configure(None, run)  # type: ignore[arg-type]
    return strategy.wrap_model(model, run)


def outcome(model: Any) -> list[Tensor]:
    """Logits and all gradients."""
    ids = torch.arange(24).reshape(2, 12) % 100
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [logits.detach(), *grads]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_what_it_computed_before(kind: str) -> None:
    model = model_of(kind)
    expected = outcome(model)
    fuse(model, swiglu=kind != "gemma3_text")
    for a, b in zip(expected, outcome(model), strict=True):
        assert float((a - b).norm()) <= 2e-6 * float(a.norm())


@pytest.mark.parametrize(
    ("kind", "formula"), [("llama", (0.0, "llama")), ("gemma3_text", (1.0, "gemma")), ("olmo2", (0.0, "gemma"))]
)
def test_the_formula_of_a_norm_is_read_off_it(kind: str, formula: tuple[float, str]) -> None:
    norm = norms(model_of(kind, torch.bfloat16))[0]
    assert prove_norm(norm, stand_in(), CPU) == formula


def test_what_is_found_in_a_model() -> None:
    found = {kind: [len(f(model_of(kind))) for f in (norms, gated, rotating)] for kind in MODELS}
    assert found == {
        "llama": [5, 2, 2],
        "mistral": [5, 2, 2],
        "qwen3": [9, 2, 2],  # with norms of queries and keys
        "gemma3_text": [13, 0, 2],  # GeGLU is not SwiGLU
        "phi3": [5, 2, 2],  # gate and up from one projection
        "olmo2": [9, 2, 2],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_rounding_is_no_reason_to_refuse(kind: str, dtype: torch.dtype) -> None:
    fuse(model_of(kind, dtype))


# -- wrong kernels ----------------------------------------------------------------------------------------------------


def off_by_one_percent(part: str, backward: bool) -> fused.Kernels:
    """The stand-in, with one function, or its gradient, wrong by 1 %."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor * (1 if backward else 1.01)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (1.01 if backward else 1)

    right = stand_in()

    def wrong(*arguments: Any) -> Any:
        found = getattr(right, part)(*arguments)
        return Wrong.apply(found) if isinstance(found, Tensor) else (Wrong.apply(found[0]), found[1])

    return fused.Kernels(**{**vars(right), part: wrong})


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("part", "key", "module"),
    [("rms_norm", "rms_norm", "Qwen3RMSNorm"), ("silu_mul", "swiglu", "Qwen3MLP"), ("rope", "rope", "Qwen3Attention")],
)
def test_a_kernel_that_is_wrong_by_one_percent_is_refused_by_name(
    part: str, key: str, module: str, dtype: torch.dtype, backward: bool
) -> None:
    model = model_of("qwen3", dtype)
    with pytest.raises(UserError, match=f"^fused_kernels.{key}: {module} gives other numbers .*; set {key}: false$"):
        fuse(model, off_by_one_percent(part, backward))
    assert not any("forward" in vars(m) for m in model.modules())  # nothing was replaced
    assert model.training


def test_a_kernel_that_fails_is_refused_by_name() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError(torch.float64)

    kernels = fused.Kernels(**{**vars(stand_in()), "silu_mul": fails})
    with pytest.raises(UserError, match=r"swiglu: LlamaMLP cannot use the kernel in .*\(KeyError: .*swiglu: false"):
        fuse(model_of("llama"), kernels)


def test_an_attention_that_looks_at_queries_before_rope_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes over them."""
    from transformers.models.llama import modeling_llama as llama

    real = llama.LlamaAttention.forward

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return llama.apply_rotary_pos_emb(q, k, cos, sin)

    space = {"apply_rotary_pos_emb": apply_rotary_pos_emb, "real": real}
    exec(
        "def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **rest):\n"
        "    q = self.q_proj(hidden_states).view(*hidden_states.shape[:2], -1, self.head_dim).transpose(1, 2)\n"
        "    rotated, _ = apply_rotary_pos_emb(q, q, *position_embeddings)\n"
        "    return (rotated * q).transpose(1, 2).flatten(2), None\n",
        space,
    )
    monkeypatch.setattr(llama.LlamaAttention, "forward", space["forward"])
    with pytest.raises(UserError, match="rope: LlamaAttention gives other numbers"):
        fuse(model_of("llama"), rms_norm=False, swiglu=False)


def test_an_interleaved_rope_is_refused() -> None:
    config = AutoConfig.for_model("cohere", **{**GATED, "bos_token_id": 1, "eos_token_id": 2})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="rope: CohereAttention gives other numbers"):
        fuse(model, rms_norm=False, swiglu=False)


# -- only this model --------------------------------------------------------------------------------------------------


def test_another_model_of_the_class_stays_as_it_is() -> None:
    from transformers.models.llama import modeling_llama as llama

    other, before = model_of("llama"), (llama.apply_rotary_pos_emb, llama.LlamaAttention.forward)
    model = fuse(model_of("llama"))
    assert (llama.apply_rotary_pos_emb, llama.LlamaAttention.forward) == before
    assert not any("forward" in vars(module) for module in other.modules())
    assert sum("forward" in vars(module) for module in model.modules()) == 5 + 2 + 2


def test_a_norm_never_writes_over_the_gradient_it_is_given() -> None:
    """Gemma: the residual branch gets the same tensor."""
    asked: list[bool] = []

    class Asked(RMSNorm):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensor:
            asked.append(arguments[-1])
            return RMSNorm.forward(ctx, *arguments)

    fuse(model_of("gemma3_text"), fused._applied(Asked, SiLUMul, RoPE), swiglu=False)
    assert asked
    assert not any(asked)


@pytest.mark.parametrize(("hidden", "weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmo2"])
def test_a_norm_whose_weight_has_another_dtype(kind: str, hidden: torch.dtype, weight: torch.dtype) -> None:
    norm = norms(model_of(kind, weight))[0]
    given = torch.randn(2, 5, len(norm.weight)).to(hidden)
    expected = norm(given)
    found = fused_norm(norm, stand_in(), prove_norm(norm, stand_in(), CPU))(given)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


# -- together with others ---------------------------------------------------------------------------------------------


def train(model: Any, *strategies: Any) -> tuple[Trainer, list[Tensor]]:
    rows = [{"input_ids": list(range(n, n + 24))} for n in range(4)]
    training = TrainingConfig(batch_size=4, max_steps=2, learning_rate=1e-2, max_length=32)
    trainer = Trainer(model, rows, training=training, strategies=strategies)
    trainer.train()
    return trainer, [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


def counting() -> tuple[fused.Kernels, dict[str, int]]:
    calls = {"rms_norm": 0, "silu_mul": 0, "rope": 0}

    def counted(name: str, function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return called

    return fused.Kernels(**{name: counted(name, f) for name, f in vars(stand_in()).items()}), calls


@pytest.mark.parametrize("first", [True, False], ids=["fused-first", "fused-last"])
def test_slices_use_the_kernels_in_every_pass_whatever_the_order(first: bool) -> None:
    """Norms of queries and keys, which ChunkedLayers leaves out for a while, keep their kernels."""
    model = model_of("qwen3")
    expected = train(copy.deepcopy(model), LoRA(r=4))[1]
    strategy, (kernels, calls) = fused_kernels(), counting()
    strategy._given = kernels
    others = [LoRA(r=4), ChunkedLayers(chunk_size=16), GradientCheckpointing()]
    trainer, weights = train(model, *([strategy, *others] if first else [*others, strategy]))
    for a, b in zip(expected, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all("forward" in vars(m) for m in [*norms(trainer.model), *gated(trainer.model)])
    before = dict(calls)
    with torch.no_grad():
        trainer.model(input_ids=torch.arange(24).reshape(1, 24), use_cache=False)
    # all in two slices: two layers, where norms of queries and keys are left out after attention, and the last norm
    assert {name: calls[name] - before[name] for name in calls} == {
        "rms_norm": 2 * (2 * (1 + 2) + 2 * 2) + 2,
        "silu_mul": 2 * 2,
        "rope": 2 * 2 * 2,
    }


def test_nothing_is_replaced_twice() -> None:
    model = fuse(model_of("llama"))
    with pytest.raises(UserError, match="rms_norm: LlamaRMSNorm has a forward of its own already"):
        fuse(model)


# -- refusals and notices ---------------------------------------------------------------------------------------------


def test_on_a_cpu_the_plain_operations_run_and_a_notice_says_so() -> None:
    trainer, weights = train(model_of("llama"), FusedKernels())
    (notice,) = trainer.result["notices"]
    assert notice.startswith("fused_kernels: the kernels run on CUDA alone")
    assert not any("forward" in vars(module) for module in trainer.model.modules())
    for a, b in zip(train(model_of("llama"))[1], weights, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm": False, "rope": False, "swiglu": False}, "all off"),
        ({"revision": "a" * 40}, "revision: has no effect with source: liger"),
        ({"source": "kernels"}, "give the commit of kernels-community/liger-kernels"),
        ({"source": "kernels", "revision": "main"}, "40 hexadecimal digits"),
    ],
)
def test_settings_without_effect_are_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FusedKernels(**fields)


@pytest.mark.parametrize(
    ("kind", "part"), [("gemma3_text", "swiglu"), ("gpt2", "rms_norm"), ("gpt2", "rope"), ("gpt2", "swiglu")]
)
def test_a_part_that_finds_nothing_is_an_error(kind: str, part: str) -> None:
    sizes = MODELS.get(kind, {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    chosen = {name: name == part for name in ("rms_norm", "rope", "swiglu")}
    with pytest.raises(UserError, match=f"^fused_kernels.{part}: {type(model).__name__} has no .*; set {part}: false$"):
        fuse(model, **chosen)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy takes this device for a CUDA card."""
    monkeypatch.setattr("lowmem.strategies.fused_kernels.device_kind", lambda _: "cuda")


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)


def test_an_absent_package_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch, as_on_cuda: None) -> None:
    hide(monkeypatch, "liger_kernel")
    with pytest.raises(UserError, match=r"liger-kernel cannot be imported .*pip install 'lowmem\[liger\]'"):
        train(model_of("llama"), FusedKernels())
    hide(monkeypatch, "kernels")
    with pytest.raises(UserError, match=r"package kernels cannot be imported .*pip install 'lowmem\[kernels\]'"):
        train(model_of("llama"), FusedKernels(source="kernels", revision="a" * 40))


def test_the_package_is_used_where_it_is_there(monkeypatch: pytest.MonkeyPatch, as_on_cuda: None) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    for name, module in package("liger_kernel.ops").items():
        monkeypatch.setitem(sys.modules, name, module)
    trainer, weights = train(model_of("llama"), FusedKernels())
    assert sum("forward" in vars(module) for module in trainer.model.modules()) == 9
    assert not trainer.result["notices"]
    for a, b in zip(train(model_of("llama"))[1], weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_hub_is_asked_for_one_commit(monkeypatch: pytest.MonkeyPatch, as_on_cuda: None) -> None:
    """A stand-in for the package kernels: what it fetches could not be tried."""
    asked = []

    def get_kernel(name: str, revision: str) -> Any:
        asked.append((name, revision))
        if revision == "b" * 40:
            raise OSError("no such commit\nmore")
        return SimpleNamespace(__name__="fetched")

    for name, module in package("fetched").items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "kernels", ModuleType("kernels"))
    monkeypatch.setattr(sys.modules["kernels"], "get_kernel", get_kernel, raising=False)
    trainer, _ = train(model_of("llama"), FusedKernels(source="kernels", revision="a" * 40))
    assert sum("forward" in vars(module) for module in trainer.model.modules()) == 9
    assert asked == [("kernels-community/liger-kernels", "a" * 40)]
    with pytest.raises(UserError, match=r"liger-kernels at b{40}: OSError: no such commit$"):
        train(model_of("llama"), FusedKernels(source="kernels", revision="b" * 40))


# -- memory -----------------------------------------------------------------------------------------------------------


def peak(*strategies: Any) -> int:
    """Bytes predicted for a card: bfloat16, two layers, nothing recomputed."""
    with torch.device("meta"):
        model = make_llama(torch.bfloat16, num_hidden_layers=2, hidden_size=256, intermediate_size=1024)
    training = TrainingConfig(batch_size=1, max_steps=2, max_length=2048, max_grad_norm=None)
    return int(record(model, training, [LoRA(r=4), *strategies], "cuda", (2048,)).peak()[0])


def test_a_card_is_predicted_to_save_what_the_kernels_save() -> None:
    plain, tokens = peak(), 2048
    layers, width, intermediate = 2, 256, 1024
    norms_alone = plain - peak(FusedKernels(rope=False, swiglu=False))
    swiglu_alone = plain - peak(FusedKernels(rope=False, rms_norm=False))
    # for each of the layers' four norms a 16-bit tensor waits for backward, instead of one in float32
    assert norms_alone >= 4 * (4 - 2) * tokens * width
    # silu(gate) waits no longer, and backward makes no tensor of its own
    assert swiglu_alone >= layers * 2 * tokens * intermediate
    assert plain - peak(FusedKernels()) > max(norms_alone, swiglu_alone)


def test_on_a_cpu_nothing_is_predicted_to_be_saved() -> None:
    with torch.device("meta"):
        model = make_llama()
    training = TrainingConfig(batch_size=1, max_steps=2, max_length=64)
    peaks = [record(copy.deepcopy(model), training, s, "cpu", (64,)).peak()[0] for s in ([], [FusedKernels()])]
    assert peaks[0] == peaks[1]


# -- the real kernels, interpreted ------------------------------------------------------------------------------------

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("liger_kernel") or not find_spec("triton"),
    reason="needs TRITON_INTERPRET=1, liger-kernel and triton",
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> fused.Kernels:
    """Liger on a CPU. Triton's interpreter lacks two things: float arguments as tensors, and CUDA's rsqrt."""
    import numpy as np
    import triton
    from triton.runtime import interpreter

    real = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return real(argument)

    run = interpreter.GridExecutor.__call__

    def unseen(self: Any, *arguments: Any, **options: Any) -> None:
        with _disable_current_modes():  # the interpreter's own copies of arguments are no allocations of a kernel
            run(self, *arguments, **options)
        gc.collect()  # the interpreter holds on to arguments in cycles

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unseen)
    monkeypatch.setattr(import_module("liger_kernel.ops.rms_norm"), "rsqrt", triton.jit(_rsqrt))
    return fused.from_liger()


def _rsqrt(x):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt(x)


@INTERPRETED
@pytest.mark.parametrize("kind", MODELS)
def test_interpreted_kernels_compute_what_the_model_computed(kind: str, interpreted: fused.Kernels) -> None:
    model = model_of(kind)
    expected = outcome(model)
    fuse(model, interpreted, swiglu=kind != "gemma3_text")
    for a, b in zip(expected, outcome(model), strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(a.norm())


@INTERPRETED
@pytest.mark.parametrize("trained", [True, False])
def test_interpreted_kernels_allocate_what_their_form_without_data_does(
    trained: bool, interpreted: fused.Kernels
) -> None:
    def live(kernels: fused.Kernels, device: str) -> list[int]:
        """Bytes after every step of a chain of all three kernels, forward and backward, and their peak."""
        found = []
        with Trace("cpu") as trace, torch.device(device):
            hidden = torch.randn(2, 8, 64, requires_grad=True)
            weight = torch.randn(64, requires_grad=trained)
            up, cos, sin = torch.randn(2, 8, 64), torch.randn(1, 8, 16), torch.randn(1, 8, 16)
            output = kernels.rms_norm(hidden, weight, 1e-6, 0.0, "llama")
            found.append(trace.peak()[0])
            output = kernels.silu_mul(output * 1, up * 1)
            found.append(trace.peak()[0])
            heads = output.view(2, 8, 4, 16).transpose(1, 2)
            query, key = kernels.rope(heads, heads[:, :2], cos, sin)
            found.append(trace.peak()[0])
            (query.sum() + key.sum()).backward()
            return [*found, trace.peak()[0]]

    real = live(interpreted, "cpu")
    with on_meta("cpu"):
        assert live(fused.without_data(1), "meta") == real
