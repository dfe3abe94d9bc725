"""A model cut into stages of layers: what each rank of a pipeline keeps, and how it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.model import blocks, decoder, hidden_states, norms_beside, unwrapped

_TOKENS = 8  # of a trial


class Stages:
    """The stages of a model: like numbers of layers, the embedding with the first, norm and head with the last.

    Modules of other stages are replaced by ones without parameters, so the names of what remains never change.

    Args:
        model: whole; adapters and wrapped forwards are in place.
        number: stages.

    Attributes:
        place: the stage that has been kept; null while the model is whole.
        outputs: length of the tuple that a layer returns; 0: a tensor alone.

    Raises:
        UserError: fewer layers than stages, or a model whose ends are unknown.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        self.model, self.number = model, number
        self.place: int | None = None
        self.layers, self.norms = blocks(model), norms_beside(model)
        self._decoder = decoder(model)
        inner: Any = unwrapped(model)
        if not hasattr(inner, "get_input_embeddings"):
            raise UserError(f"pipeline_parallel: {type(inner).__name__} does not say which module is its embedding")
        self.embedding: nn.Module = inner.get_input_embeddings()
        self.head: nn.Module | None = inner.get_output_embeddings()
        if number > len(self.layers):
            raise UserError(f"pipeline_parallel.stages: {number}, and the model has {len(self.layers)} layers")
        self.borders = borders(len(self.layers), number)
        table = next(module for module in self.embedding.modules() if isinstance(module, nn.Embedding))
        self.width = table.embedding_dim
        self._received = _Received(self.width, table.weight.dtype)
        self.outputs = 0

    def run(self, inputs: dict[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Hidden states (rows, length, width) behind the layers of this stage, which is not the last.

        Args:
            inputs: a collated micro-batch, the same on all stages.
            hidden: those in front of them; null on the first stage.
        """
        with self._received.holding(hidden):
            return hidden_states(self._decoder, inputs)

    def finish(self, loss: Any, inputs: dict[str, Tensor], hidden: Tensor) -> Tensor:
        """What `loss(model, inputs)` is on the last stage."""
        with self._received.holding(hidden):
            result: Tensor = loss(self.model, inputs)
            return result

    def receive(self, dtype: torch.dtype) -> None:
        """Be told in which dtype hidden states come."""
        self._received.dtype = dtype

    def dtype_behind(self) -> torch.dtype:
        """The dtype of the hidden states that this stage hands on; a few tokens are computed."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.run(few_tokens(next(self.model.parameters()).device), None).dtype
        finally:
            self.model.train(training)

    # -- cutting ------------------------------------------------------------------------------------------------------

    @contextmanager
    def only(self, place: int) -> Iterator[None]:
        """Inside, the model is this stage."""
        replaced = self._cut(place)
        try:
            yield
        finally:
            for parent, name, child in replaced:
                parent._modules[name] = child

    def keep(self, place: int) -> None:
        """Let go of all that other stages compute."""
        tied = {id(p) for p in self.embedding.parameters()}
        self._cut(place)
        self.place = place
        if place > 0 and self.head is not None:
            for module in self.head.modules():  # a frozen copy, which is nobody's to save
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if id(parameter) in tied:
                        delattr(module, name)
                        module.register_buffer(name, parameter.detach(), persistent=False)
        del self.layers, self.norms, self.embedding, self.head  # which would keep the weights of other stages

    def _cut(self, place: int) -> list[tuple[nn.Module, str, nn.Module]]:
        first, last = self.borders[place], self.borders[place + 1]
        away: dict[int, nn.Module] = {
            id(layer): _Elsewhere(layer, self.outputs)
            for number, layer in enumerate(self.layers)
            if not first <= number < last
        }
        if place > 0:
            away[id(self.embedding)] = self._received
        if place < self.number - 1:
            away |= {id(norm): nn.Identity() for norm in self.norms}
            away |= {id(self.head): nn.Identity()} if self.head is not None else {}
        replaced = [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if id(child) in away
        ]
        for parent, name, child in replaced:
            parent._modules[name] = away[id(child)]
        return replaced


def borders(layers: int, number: int) -> list[int]:
    """The first layer of each of so many stages, and the number of layers."""
    return [layers * i // number for i in range(number + 1)]


class _Elsewhere(nn.Module):
    """A layer of another stage: hidden states pass through."""

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # a model may ask a layer for its kind
            if isinstance(value, str | int) and not name.startswith("_"):
                setattr(self, name, value)
        self._outputs = outputs

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden, *[None] * (self._outputs - 1)) if self._outputs else hidden


class _Received(nn.Module):
    """In the embedding's place on later stages: the hidden states of the stage before.

    Where something is tried on other tokens (a loss that proves itself), numbers made from the ids stand in for them.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype
        self._hidden: Tensor | None = None

    @contextmanager
    def holding(self, hidden: Tensor | None) -> Iterator[None]:
        """Inside, the embedding gives these."""
        self._hidden = hidden
        try:
            yield
        finally:
            self._hidden = None

    def forward(self, input_ids: Tensor) -> Tensor:
        if self._hidden is not None and self._hidden.shape[:2] == input_ids.shape:
            return self._hidden
        numbers = torch.arange(1, self.width + 1, device=input_ids.device)
        return torch.sin((input_ids + 1.0).unsqueeze(-1) * numbers).to(self.dtype)


def few_tokens(device: torch.device) -> dict[str, Tensor]:
    """A short row, to try something on."""
    return {"input_ids": torch.arange(1, _TOKENS + 1, device=device).unsqueeze(0)}
