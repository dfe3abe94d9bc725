"""What must hold before a model is cut: its stages make the model, and each trains parameters of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem.embeddings import new_token_ids
from lowmem.errors import UserError
from lowmem.model import call, unwrapped
from lowmem.stages import Stages, few_tokens


@torch.no_grad()
def prove(stages: Stages) -> None:
    """One stage after another gives the logits of the whole model, on a few tokens; without data, their shape.

    Raises:
        UserError: it does not, so there is more between embedding and head than is known.
    """
    model = stages.model
    few = few_tokens(next(model.parameters()).device)
    training = model.training
    model.eval()
    seen = stages.layers[0].register_forward_hook(lambda *given: _look(stages, given[-1]))
    try:
        expected = call(model, few)
        seen.remove()
        got, why = _chain(stages, few, expected), "other logits"
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        got, why = None, " ".join(str(error).split())[:120]
    finally:
        seen.remove()
        model.train(training)
    same = got is not None and got.shape == expected.shape
    if not same or not (expected.is_meta or torch.allclose(got, expected, 1e-3, 1e-4, True)):  # type: ignore[arg-type]
        raise UserError(
            f"pipeline_parallel: {type(unwrapped(model)).__name__} does more between its embedding and its "
            f"head than its layers and a norm ({why}), so it cannot be cut into stages; use fsdp_2 or ddp"
        )


def _look(stages: Stages, output: Any) -> None:
    stages.outputs = len(output) if isinstance(output, tuple) else 0


def _chain(stages: Stages, few: dict[str, Tensor], expected: Tensor) -> Tensor:
    hidden: Tensor | None = None
    for place in range(stages.number):
        with stages.only(place):
            if place == stages.number - 1 and hidden is not None:
                return stages.finish(call, few, hidden)
            hidden = stages.run(few, hidden)
    return expected  # one stage


def require_own_parameters(stages: Stages) -> None:
    """Every trained parameter belongs to one stage, and every stage has one.

    Raises:
        UserError: embedding and head are trained as one tensor, something is trained that all stages have, or a
            stage has nothing to train.
    """
    model: nn.Module = stages.model
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    holders: dict[int, list[int]] = {key: [] for key in trained}
    for place in range(stages.number):
        with stages.only(place):
            for p in model.parameters():
                if id(p) in holders:
                    holders[id(p)].append(place)
    for key, places in holders.items():
        if len(places) != 1:
            raise UserError(
                f"pipeline_parallel: {trained[key]} is trained, and stages {', '.join(map(str, places))} need it "
                "(an embedding that is tied to the head, say); freeze it (lora), or use fsdp_2 or ddp"
            )
    for place in range(stages.number):
        if not any(places == [place] for places in holders.values()):
            layers = f"layers {stages.borders[place]} to {stages.borders[place + 1] - 1}"
            raise UserError(f"pipeline_parallel: stage {place} ({layers}) has nothing to train; use fewer stages")
    beside = [name for name in trained.values() if "modules_to_save" in name or "trainable_tokens" in name]
    if beside or (hasattr(model, "peft_config") and new_token_ids(model)):
        raise UserError(
            f"pipeline_parallel: {(beside or ['a row of an added token'])[0]} belongs to the file of an adapter, "
            "and so would weights of other stages; leave out modules_to_save and added tokens, or use fsdp_2 or ddp"
        )
