"""StreamedWeights: the frozen weights of layers lie on the host and visit the card."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowmem.config import LoadConfig
from lowmem.model import blocks, wrap_forward
from lowmem.ops.host_memory import HostPool
from lowmem.ops.streamed import Away, Slot, Streamer, key_of, require_frozen, settle_int8, slots_of, visiting
from lowmem.run import Run, device_kind
from lowmem.sizes import parse_size
from lowmem.strategy import ForwardBackward, Sample, Stage, Strategy, Trait


@dataclass
class StreamedWeights(Strategy):
    """Frozen layer weights, of any dtype or quantised, wait in pinned host memory and come one layer ahead.

    What is trained, the embedding, the head and all buffers stay on the card, and so do weights that layers share.

    Attributes:
        pinned_memory: how much host memory may be pinned (`24GiB`); null: no bound. Beyond it memory is pageable.
    """

    stage: ClassVar[Stage] = Stage.OFFLOAD
    slot: ClassVar[str | None] = "layer_weights"
    saves: ClassVar[str] = "frozen layer weights on the card: those of two layers instead of all"
    costs: ClassVar[str] = "every layer's weights cross the bus twice a pass; the host holds them"
    period = 1
    remedy: ClassVar[str] = "use it with gradient_checkpointing of every layer, and without keep, budget and compile"

    pinned_memory: str | None = None
    _streamer: Streamer | None = field(default=None, init=False, repr=False, compare=False)
    _blocks: list[nn.Module] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pinned_memory is not None:
            parse_size(self.pinned_memory, "streamed_weights.pinned_memory")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.RECOMPUTE, Trait.STATIC_PARAMS, Trait.DENSE_PARAMS, Trait.WHOLE_MODEL})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.PURE_BLOCKS})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        # Quantised weights are small enough for the card to hold them until they go; others must never be there.
        if device_kind(run.device) == "cuda" and "quantization_config" not in config.from_pretrained:
            here = config.device if run.device.type == "meta" else torch.device("cpu")
            return replace(config, device=here, on_host=True)
        return config

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        self._blocks = blocks(model)
        require_frozen(self._blocks)
        if device_kind(run.device) == "cpu":
            run.notice("streamed_weights: on a CPU there is nowhere to go; weights are copied, nothing is saved")
        going = {key_of(slot.get()) for slots in self._going(model) for slot in slots}
        _move_rest(model, going, run.device)
        for number, block in enumerate(self._blocks):
            wrap_forward(block, lambda forward, b=block, n=number: visiting(b, forward, n, self._ready))  # type: ignore[misc]
        return model

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        assert run.model is not None
        limit = None if self.pinned_memory is None else parse_size(self.pinned_memory, "pinned_memory")
        pool = HostPool(run.device, limit, lambda text: run.notice(f"{self.name}: {text}"))
        for module in run.model.modules():
            settle_int8(module)
        # Only now: until here, other strategies may have given weights another dtype.
        layers = [Away(slots, pool) for slots in self._going(run.model)]
        streamer = self._streamer = Streamer(layers, run.device)

        def streamed(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            try:
                return forward_backward(micro_batches, divisor)
            finally:
                streamer.rest()

        return streamed

    def _ready(self) -> Streamer:
        assert self._streamer is not None, "the model ran before it was built"
        return self._streamer

    def _going(self, model: nn.Module) -> list[list[Slot]]:
        """What leaves the card, layer by layer: not what is used elsewhere, too."""
        everywhere = Counter(key_of(slot.get()) for slot in slots_of(model))
        return [_alone(slots_of(block), everywhere) for block in self._blocks]


def _alone(slots: list[Slot], everywhere: Counter[Any]) -> list[Slot]:
    here = Counter(key_of(slot.get()) for slot in slots)
    return [slot for slot in slots if here[key_of(slot.get())] == everywhere[key_of(slot.get())]]


def _move_rest(model: nn.Module, going: set[Any], device: torch.device) -> None:
    """What stays goes to the device, where it is not there yet."""
    for parameter in model.parameters():
        if key_of(parameter.data) not in going:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
