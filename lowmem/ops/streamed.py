"""Frozen weights of layers that lie on the host and visit the card.

Each layer has one buffer on the host with all its frozen tensors. When the layer is entered, they lie in one new buffer
on the card, copied there by a side stream while the layer before it was at work, and its parameters point into it;
when it is left they point at the host again. Outside of its visit, whoever reads a weight reads the host's.

    in      memory is allocated on the main stream, and the side stream waits for that stream before it writes; the main
            stream waits for the copy before it reads
    out     the parameters let go, and with the last reference the allocator gets the memory back; what the main stream
            has been told to do with it comes before whatever takes it next
    missed  weights that came and were not wanted go only after the main stream has waited for their copy

So nothing is ever written over what may still be read: no buffer is used again by us, and autograd's references keep
theirs alive. `record_stream` is not needed, for the reasons in `ops/offload.py`. A wrong guess at the next layer costs
a late copy, never wrong weights.

In backward a layer stays until another one is entered. It is entered before the first of its gradients is computed: the
gradient of its output asks for a tensor that was saved when the layer began, and checkpointing answers by running it
again. So functions that keep no weight, and look it up in backward (bitsandbytes in 8 bits, slices of a sequence), find
it; bitsandbytes' product in 4 bits, which would keep the first visit's copy until then, is replaced by one that looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.ops.dequantised import looked_up
from lowmem.ops.host_memory import HostPool
from lowmem.ops.without_data import called

LABEL = "weights, streamed"
_ALIGNED = 256  # bytes, as torch's allocator places tensors
Visit = tuple[int, str]  # which layer, and on which way


@dataclass(frozen=True)
class Slot:
    """Where a tensor hangs: a parameter of a module, or an attribute of something else."""

    holder: Any
    name: str

    def get(self) -> Tensor:
        """What hangs there (of a parameter its data)."""
        found: Tensor = getattr(self.holder, self.name)
        return found.data

    def put(self, tensor: Tensor) -> None:
        """Let it be another one. A parameter stays the same object."""
        if isinstance(self.holder, nn.Module):
            getattr(self.holder, self.name).data = tensor
        else:
            setattr(self.holder, self.name, tensor)


def slots_of(block: nn.Module) -> list[Slot]:
    """Frozen parameters of a layer, and the tensors that quantised ones carry beside their bytes."""
    found = []
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            found.append(Slot(module, name))
            state = getattr(parameter, "quant_state", None)
            of_int8 = getattr(module, "state", None) if hasattr(parameter, "SCB") else None
            for holder in (state, getattr(state, "state2", None), of_int8):
                if holder is not None:
                    found += [Slot(holder, n) for n, value in vars(holder).items() if isinstance(value, Tensor)]
    return found


def settle_int8(module: nn.Module) -> None:
    """bitsandbytes moves 8-bit weights from the parameter to the layer at the first call; here it does so at once."""
    if getattr(getattr(module, "weight", None), "CB", None) is not None and hasattr(module, "init_8bit_state"):
        module.init_8bit_state()  # type: ignore[operator]


def key_of(tensor: Tensor) -> tuple[Any, ...]:
    """The same for two tensors that are the same piece of memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.dtype


class Away:
    """A layer's frozen weights: on the host, and for a time on the card.

    Args:
        slots: where they hang; some may share a tensor.
        pool: gives the host's memory.
    """

    def __init__(self, slots: Sequence[Slot], pool: HostPool) -> None:
        self.pieces: dict[tuple[Any, ...], tuple[list[Slot], int]] = {}
        self.size = 0
        for slot in slots:
            tensor = slot.get()
            if (key := key_of(tensor)) not in self.pieces:
                self.pieces[key] = ([], self.size)
                self.size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            self.pieces[key][0].append(slot)
        with called(LABEL):
            self.host = pool.take(self.size)
        self.homes = self._views(self.host)
        for view, (hanging, _) in zip(self.homes, self.pieces.values(), strict=True):
            view.copy_(hanging[0].get())
        self.card: Tensor | None = None
        self.done: Any = None
        self._point(self.homes)

    def begin(self, device: torch.device, side: Any) -> None:
        """Start the way to the card."""
        with called(LABEL):
            self.card = torch.empty(self.size, dtype=torch.uint8, device=device)
        if side is None:
            self.card.copy_(self.host)
            return
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.card.copy_(self.host, non_blocking=True)
            self.done = side.record_event()

    def settle(self, device: torch.device) -> None:
        """What the main stream is told from now on comes after the copy."""
        if self.done is not None:
            torch.cuda.current_stream(device).wait_event(self.done)
            self.done = None

    def arrive(self) -> None:
        """The weights are those on the card."""
        assert self.card is not None
        self._point(self._views(self.card))

    def leave(self) -> None:
        """The weights are those on the host."""
        self._point(self.homes)
        self.card = None

    def _views(self, buffer: Tensor) -> list[Tensor]:
        found = []
        for (_, _, shape, dtype), (_, start) in self.pieces.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            found.append(buffer[start : start + size].view(dtype).view(shape))
        return found

    def _point(self, views: Sequence[Tensor]) -> None:
        for view, (hanging, _) in zip(views, self.pieces.values(), strict=True):
            for slot in hanging:
                slot.put(view)


class Streamer:
    """Takes layers to the card in the order in which they are entered, one ahead.

    Args:
        layers: their weights.
        device: where they are used.
    """

    def __init__(self, layers: Sequence[Away], device: torch.device) -> None:
        self.layers, self.device = layers, device
        cuda: Any = torch.cuda
        self._side = cuda.Stream(device) if device.type == "cuda" else None
        self._here: set[int] = set()  # on the card, or on the way
        self._next: dict[tuple[Visit | None, Visit], Visit] = {}  # after two visits, which came last time
        self._trail: tuple[Visit | None, Visit] | None = None

    def enter(self, number: int) -> None:
        """A layer is about to run: its weights are on the card, and the next one's on their way."""
        visit = (number, _way())
        begins = number == 0 and visit[1] != "back"
        if self._trail is not None and not begins:
            self._next[self._trail] = visit
        self._trail = (None if begins or self._trail is None else self._trail[1], visit)
        for other in self._here - {number}:
            self._drop(other)
        if number not in self._here:
            self._begin(number)
        layer = self.layers[number]
        layer.settle(self.device)
        layer.arrive()
        if (coming := self._coming()) is not None and coming not in self._here:
            self._begin(coming)

    def leave(self, number: int) -> None:
        """A layer has run. In backward its weights stay for its gradients, until another layer is entered."""
        if _way() != "back" and self._coming() != number:
            self._drop(number)

    def rest(self) -> None:
        """Nothing is on the card any more."""
        for number in list(self._here):
            self._drop(number)
        self._trail = None

    def _coming(self) -> int | None:
        """What comes next, as far as one can tell; a guess."""
        assert self._trail is not None
        if (known := self._next.get(self._trail)) is not None:
            return known[0]
        number, way = self._trail[1]
        if way == "back":
            return None  # one pass shows how many layers are recomputed together
        if number + 1 < len(self.layers):
            return number + 1
        return number if way == "forth" else None  # backward begins with the last

    def _begin(self, number: int) -> None:
        self.layers[number].begin(self.device, self._side)
        self._here.add(number)

    def _drop(self, number: int) -> None:
        self.layers[number].settle(self.device)
        self.layers[number].leave()
        self._here.discard(number)


def _way() -> str:
    if torch._C._current_graph_task_id() != -1:
        return "back"
    return "forth" if torch.is_grad_enabled() else "evaluation"


def visiting(
    block: nn.Module, forward: Callable[..., Any], number: int, streamer: Callable[[], Streamer]
) -> Callable[..., Any]:
    """A layer's forward, with its weights on the card.

    Args:
        block: the layer.
        forward: its forward.
        number: which one it is.
        streamer: who brings them.
    """

    def visited(*args: Any, **kwargs: Any) -> Any:
        streamer().enter(number)
        if not torch.is_grad_enabled():
            output = forward(*args, **kwargs)
            streamer().leave(number)
            return output
        saved = _Saved.apply(torch.empty(0, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
        with looked_up(block):
            output = forward(*args, **kwargs)
        if _way() == "forth":
            _ask_first(output if isinstance(output, tuple | list) else (output,), saved)
        streamer().leave(number)
        return output

    return visited


def _ask_first(outputs: Sequence[Any], saved: Any) -> None:
    """Before any gradient inside the layer is computed, ask for what was saved when it began."""
    unasked = [saved]

    def ask(_: Tensor) -> None:
        if unasked:
            _ = unasked.pop().saved_tensors

    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(ask)  # type: ignore[no-untyped-call]


class _Saved(torch.autograd.Function):
    """Saves something; who asks for it makes checkpointing run the layer again."""

    @staticmethod
    def forward(ctx: Any, marker: Tensor) -> Tensor:
        ctx.save_for_backward(marker)
        return marker.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("nothing depends on the marker")


def require_frozen(blocks: Sequence[nn.Module]) -> None:
    """Some layer has a frozen weight.

    Raises:
        UserError: none has.
    """
    if not any(slots_of(block) for block in blocks):
        raise UserError(
            "streamed_weights: every weight of the layers is trained, and what is trained stays on the card; add lora "
            "or adapter, or drop streamed_weights"
        )
