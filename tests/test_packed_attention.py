"""Packed rows with FlexAttention: borders come from restarting positions, as a block mask, and samples stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_llama, make_trainer
from torch.nn.attention.flex_attention import BlockMask

from lowmem import LoRA, UserError


@pytest.mark.slow  # compiles for the CPU, which takes a quarter of a minute; there is no backward on a CPU
def test_flex_attention_keeps_packed_samples_apart_without_a_full_mask() -> None:
    model = make_llama(max_position_embeddings=512).eval()
    lengths = (100, 150, 50)
    ids = torch.randint(int(model.config.vocab_size), (2, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    masks: list[Any] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, given: masks.append(given["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)], 1)
        model.set_attn_implementation("flex_attention")
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert isinstance(masks[-1], BlockMask)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_flex_attention_cannot_be_trained_on_a_cpu() -> None:
    """torch has no backward of it there, and would say so in the middle of the first step."""
    with pytest.raises(
        UserError, match="attn_implementation: flex_attention has no backward on a CPU; use sdpa or eager"
    ):
        make_trainer([LoRA(r=2)], model=make_llama(attn_implementation="flex_attention"))
