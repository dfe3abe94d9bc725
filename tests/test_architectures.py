"""Every supported architecture, tiny and with random weights, under the strategies of the quickstart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from cases.helpers import SGD, KeepGradients, largest_difference, row, rows, train, weights
from peft import PeftModel
from torch import nn

from lowmem import (
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    Packing,
    Quantization,
    Trainer,
    UserError,
)
from lowmem.libraries import import_bitsandbytes
from lowmem.model import adaptable, blocks, head, linears


@dataclass
class Shape:
    """A tiny configuration, and what its layers are made of.

    Attributes:
        config: name of the configuration class.
        linears: names of the linear layers of one decoder layer.
        layers: decoder layers.
        changes: what differs from the common numbers.
        vocabulary: number of tokens.
        experts: it is a mixture of experts.
        fused: weights of its experts.
    """

    config: str
    linears: set[str]
    layers: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 128
    experts: bool = False
    fused: int = 0

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        numbers = {
            "vocab_size": self.vocabulary,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **self.changes,
        }
        config = getattr(transformers, self.config)(**{k: v for k, v in numbers.items() if v is not None})
        torch.manual_seed(0)
        options = {"experts_implementation": "eager"} if self.experts else {}  # the usual kernel has no float64
        return transformers.AutoModelForCausalLM.from_config(config, **options).to(dtype)


ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
GATED = ATTENTION | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
FUSED_ATTENTION = {"query_key_value", "dense"}
GEMMA = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
EXPERTS = {"num_experts_per_tok": 2}

SHAPES = {
    "llama": Shape("LlamaConfig", GATED),
    "solar": Shape(  # SOLAR 10.7B, smaller: four queries to a key, head of its own, intermediate 3.5 x hidden
        "LlamaConfig",
        GATED,
        layers=4,
        changes={"num_attention_heads": 8, "intermediate_size": 224, "tie_word_embeddings": False},
        vocabulary=500,
    ),
    "mistral": Shape("MistralConfig", GATED, changes={"sliding_window": 16, "head_dim": 16}),
    "qwen3": Shape("Qwen3Config", GATED, changes={"head_dim": 16}),
    "gemma3": Shape("Gemma3TextConfig", GATED, changes=GEMMA),
    "gemma2": Shape("Gemma2Config", GATED, changes={**GEMMA, "final_logit_softcapping": 0.2}),  # so low that it bends
    "phi": Shape("PhiConfig", {*(a.replace("o_proj", "dense") for a in ATTENTION), "mlp.fc1", "mlp.fc2"}),
    "phi3": Shape("Phi3Config", {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}),
    "gpt2": Shape(
        "GPT2Config",
        {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
        changes={
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "intermediate_size": None,
            "num_key_value_heads": None,
        },
    ),
    "gpt_neox": Shape(
        "GPTNeoXConfig",
        {*(f"attention.{name}" for name in FUSED_ATTENTION), "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"},
        changes={"num_key_value_heads": None},
    ),
    "olmo": Shape("OlmoConfig", GATED),
    "olmo2": Shape("Olmo2Config", GATED),
    "cohere": Shape("CohereConfig", GATED, changes={"logit_scale": 0.25}),
    "granite": Shape(
        "GraniteConfig",
        GATED,
        changes={"logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.1},
    ),
    "mixtral": Shape(
        "MixtralConfig",
        ATTENTION,
        changes={**EXPERTS, "num_local_experts": 4},
        experts=True,
        fused=2 * 4 * 3 * 64 * 128,
    ),
    "qwen2_moe": Shape(
        "Qwen2MoeConfig",
        ATTENTION | {f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
        changes={**EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        experts=True,
        fused=2 * 4 * 3 * 64 * 64,
    ),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def quickstart() -> list:
    return [
        Quantization(format="nf4"),
        LoRA(r=4),
        GradientCheckpointing(),
        GradientAccumulation(micro_batch_size=1),
        MixedPrecision(),
        ChunkedCrossEntropy(),
    ]


def four_bit(model: nn.Module) -> dict[str, nn.Module]:
    kind = import_bitsandbytes().nn.Linear4bit
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


@every_shape
def test_layout(name):
    """Decoder layers, head and linear layers are found; routers and gates of experts are not among them."""
    shape = SHAPES[name]
    model = shape.build()
    assert len(blocks(model)) == shape.layers
    assert len({type(block) for block in blocks(model)}) == 1
    assert head(model).out_features == shape.vocabulary
    names = {id(module): full for full, module in model.named_modules()}
    expected = {f"{names[id(block)]}.{part}" for block in blocks(model) for part in shape.linears}
    assert set(linears(model)) == expected
    picked = adaptable(model)
    assert {
        full
        for full, module in model.named_modules()
        if full in picked or full.rsplit(".", 1)[-1] in picked  # as peft matches names
    } == expected


@every_shape
def test_quickstart(name):
    """Two steps: all linear layers of the decoder in 4 bits, each with an adapter that learns."""
    shape = SHAPES[name]
    model = shape.build()
    before = weights(model)
    trainer = train(model, rows(8, vocabulary=shape.vocabulary), *quickstart(), max_steps=2, max_grad_norm=1.0)
    number = shape.layers * len(shape.linears)
    assert len(four_bit(trainer.model)) == number
    adapted = [m for m in trainer.model.modules() if hasattr(m, "lora_B")]
    assert len(adapted) == number
    assert all(m.lora_B["default"].weight.abs().max() > 0 for m in adapted)
    assert set(trainer.run.trainable) == {n for n, _ in trainer.model.named_parameters() if "lora_" in n}
    for full, parameter in trainer.model.named_parameters():
        plain = full.removeprefix("base_model.model.").replace(".base_layer", "")
        if plain in before and parameter.shape == before[plain].shape:
            assert torch.equal(parameter, before[plain]), full  # embeddings, norms, routers: as they were
    notices = [text for text in trainer.result["notices"] if "expert" in text]
    if shape.fused:
        assert [text.split(":")[0] for text in notices] == ["quantization", "lora"]
        assert all(f"{shape.fused:,} weights of fused experts" in text for text in notices)
    else:
        assert notices == []


@every_shape
@pytest.mark.parametrize(
    "chosen",
    [
        [ChunkedCrossEntropy(chunk_size=8)],
        [Packing()],
        [Packing(), GradientAccumulation(), GradientCheckpointing(), ChunkedCrossEntropy(chunk_size=8)],
    ],
    ids=["chunked", "packing", "all"],
)
def test_gradients_equal_the_plain_loss(name, chosen):
    """float64, so that a wrong formula cannot hide; rotary angles are float32 in some models, which leaves 1e-9."""
    shape = SHAPES[name]
    data = rows(6, vocabulary=shape.vocabulary)

    def gradients(*strategies):
        kept = KeepGradients()
        train(shape.build(torch.float64), data, kept, SGD(), *strategies, batch_size=6, max_steps=1)
        return kept.steps[0]

    plain = gradients()
    size = max(grad.abs().max() for grad in plain.values())
    fresh = [type(strategy)(**strategy.settings()) for strategy in chosen]
    assert largest_difference(plain, gradients(*fresh)) < 1e-7 * size


def test_soft_cap_bends_the_logits():
    """Without its cap the loss of the Gemma 2 above is another one: the equality tests would see a cap that is lost."""
    shape = SHAPES["gemma2"]
    losses = []
    for cap in (0.2, None):
        model = shape.build(torch.float64)
        model.config.final_logit_softcapping = cap
        losses.append(Trainer(model, eval_dataset=rows(6), strategies=[ChunkedCrossEntropy()]).evaluate()["eval_loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


# -- what is special --------------------------------------------------------------------------------------------------


def test_gpt2_adapters_fit_plain_gpt2(tmp_path):
    """GPT-2 keeps its matrices transposed. Quantised they are ordinary linear layers; the adapter fits either."""
    shape = SHAPES["gpt2"]
    data = rows(8)
    trainer = train(shape.build(), data, *quickstart(), learning_rate=1e-2, output_dir=str(tmp_path / "run"))
    loaded = PeftModel.from_pretrained(shape.build(), tmp_path / "run" / "model").eval()
    ids = torch.tensor([data[0]["input_ids"]])
    with torch.no_grad(), trainer.model.disable_adapter(), loaded.disable_adapter():
        quantised, exact = trainer.model(ids).logits, loaded(ids).logits
    rounding = (quantised - exact).abs().max()
    with torch.no_grad():
        got, adapted = loaded(ids).logits, trainer.model(ids).logits
    assert (got - exact).abs().max() > 5 * rounding  # the adapter does more than the rounding of the base
    assert torch.allclose(got, adapted, rtol=0, atol=3 * rounding.item())


def test_gpt2_weights_are_quantised_as_they_are():
    bnb = import_bitsandbytes()
    model = SHAPES["gpt2"].build()
    original = model.transformer.h[0].attn.c_attn.weight.detach().clone()  # (inputs, outputs)
    trainer = train(model, rows(4), Quantization(), LoRA(r=4), max_steps=1)
    layer = trainer.model.base_model.model.transformer.h[0].attn.c_attn.base_layer
    kept = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert kept.shape == original.T.shape
    assert (kept - original.T).abs().max() < 0.25 * original.abs().max()


def test_gpt2_lora_without_quantization():
    trainer = train(SHAPES["gpt2"].build(), rows(8), LoRA(r=4))
    assert sum(hasattr(m, "lora_B") for m in trainer.model.modules()) == 8


def test_routers_stay_as_they_are():
    """Routers that are linear layers: neither adapter nor 4 bits reach them, nor the gate of a shared expert."""
    torch.manual_seed(0)
    config = transformers.PhimoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    routers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "router" in name]
    assert len(routers) == 2
    trainer = train(model, rows(8), *quickstart(), max_steps=2)
    base = trainer.model.get_base_model()
    assert all(isinstance(base.get_submodule(name), nn.Linear) for name in routers)
    assert not any("router" in name for name in four_bit(base))
    assert not any(hasattr(base.get_submodule(name), "lora_A") for name in routers)
    moe = train(SHAPES["qwen2_moe"].build(), rows(8), *quickstart(), max_steps=2).model
    gates = [(name, m) for name, m in moe.named_modules() if name.endswith("shared_expert_gate")]
    assert [type(m) for _, m in gates] == [nn.Linear, nn.Linear]


# -- refused, with the reason -----------------------------------------------------------------------------------------


def test_layers_that_cannot_be_quantised_are_refused():
    """Falcon's layers are a class of their own; a run that quantised nothing must not pretend."""
    torch.manual_seed(0)
    config = transformers.FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(UserError, match=r"quantization: FalconForCausalLM.*FalconLinear.*drop quantization"):
        train(transformers.FalconForCausalLM(config), rows(4), *quickstart())


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_packing_is_refused_where_samples_would_mix(kind):
    """Bloom's attention knows distances, not positions; Mamba has a state that runs through the row."""
    torch.manual_seed(0)
    if kind == "bloom":
        config: Any = transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)
    else:
        config = transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8)
    with pytest.raises(UserError, match=r"packing: .*neighbour"):
        train(transformers.AutoModelForCausalLM.from_config(config), rows(4), Packing())


def test_adapters_that_peft_refuses():
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8)
    with pytest.raises(UserError, match=r"lora: .*out_proj.*Mamba"):
        train(transformers.AutoModelForCausalLM.from_config(config), rows(4), LoRA())


def test_a_head_that_does_more_is_refused_by_the_chunked_loss():
    """The loss is compared with the model's own once, so a head with an unknown twist is not mistrained."""

    class Twisted(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.square()
            return output

    torch.manual_seed(0)
    model = Twisted(SHAPES["llama"].build().config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    with pytest.raises(UserError, match=r"chunked_cross_entropy: on a few tokens.*drop chunked_cross_entropy"):
        train(model, rows(4), ChunkedCrossEntropy())


def test_a_model_without_layers_is_refused_by_checkpointing():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = nn.Embedding(128, 16), nn.Linear(16, 128)

        def forward(self, input_ids):
            return self.lm_head(self.embed(input_ids))

    assert train(Flat(), [row(1, 2, 3)], ChunkedCrossEntropy(), batch_size=1).run.global_step == 3
    with pytest.raises(UserError, match="Flat: no list of decoder layers"):
        train(Flat(), [row(1, 2, 3)], GradientCheckpointing(), batch_size=1)
