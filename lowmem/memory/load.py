"""Loading a model without data: transformers' own loading, on the meta device, from weights that are shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lowmem.config import LoadConfig
from lowmem.libraries import import_bitsandbytes
from lowmem.loading import kernel_without_data
from lowmem.memory.host import AtOnce
from lowmem.memory.trace import Trace
from lowmem.model import unwrapped
from lowmem.one_by_one import in_turn, obstacle
from lowmem.ops.without_data import keeping
from lowmem.run import device_kind
from lowmem.stored_quantization import prepare, stored_settings
from lowmem.weights import named_state

META = torch.device("meta")


def load_without_data(make: Callable[[], Any], load: LoadConfig, place: str = "device") -> nn.Module:
    """What `from_pretrained` makes of a model's files, in its own order, while a trace looks on.

    Args:
        make: transformers' model on the meta device; its shapes are those on disk.
        load: dtype and quantisation, as `lowmem.loading.load_model` takes them.
        place: `device`, or `host` (a GGUF file whose weights are quantised on their way to the card).

    Raises:
        UserError: the stored weights are quantised, and not as `load` asks for.
    """
    options = dict(load.from_pretrained)
    singly = load.one_by_one is not None and load.model is not None and obstacle(load.model) is None
    # neither `make`'s nor transformers' own skeleton has memory
    with without_bars(), _as_with_data(place), keeping("nowhere"), in_turn() if singly else nullcontext():
        source = make()
        kernel = load.attn_implementation or source.config._attn_implementation
        if kernel:
            options["attn_implementation"] = kernel_without_data(kernel)
        common: dict[str, Any] = {
            "dtype": source.dtype if load.dtype == "auto" else getattr(torch, load.dtype),
            "device_map": {"": META},
            **options,
        }
        stored: Mapping[str, OnDisk | Known] = files_of(source, place, Read if singly else OnDisk)
        if stored_settings(source.config) is not None:
            name = load.model.name_or_path if load.model else type(source).__name__
            wanted = common.pop("quantization_config", None)
            prepare(source.config, wanted, name)
            stored = _quantised_files(source, stored, {**common, "quantization_config": wanted})
        model = _from_files(type(source), source.config, stored, common)
        if kernel:
            model.config._attn_implementation = kernel  # type: ignore[union-attr]
    if place == "host":  # it goes to the device layer by layer, and the rest with `move_rest`
        vars(model)["to"] = lambda *_: model
    return model


def _from_files(
    model_class: Any, config: Any, files: Mapping[str, OnDisk | Known], options: dict[str, Any]
) -> nn.Module:
    found: nn.Module = model_class.from_pretrained(None, config=config, state_dict=files, **options)
    return found


def _quantised_files(
    source: Any, plain: Mapping[str, OnDisk | Known], options: dict[str, Any]
) -> dict[str, OnDisk | Known]:
    """The tensors in the files of a model that lies quantised: what quantising it now would leave, by its names."""
    config = copy.deepcopy(source.config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with _disable_current_modes(), patch.object(torch.Tensor, "item", lambda tensor: 0.0):  # nobody looks on
        state = named_state(_from_files(type(source), config, plain, options))
    return {name: Read(t.shape, t.dtype) if t.is_meta else Known(t) for name, t in state.items()}


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers would show bars for weights that nobody reads or writes."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def files_of(source: Any, place: str = "device", kind: type[OnDisk] | None = None) -> dict[str, OnDisk]:
    """The tensors that `save_pretrained` would write (experts one by one, tied weights once).

    Args:
        source: the model.
        place: where their copies will lie.
        kind: how they are read.
    """
    from transformers.core_model_loading import revert_weight_conversion

    stored = revert_weight_conversion(source, named_state(source))
    return {key: (kind or OnDisk)(value.shape, value.dtype, place) for key, value in stored.items()}


class OnDisk:
    """A tensor in a mapped file, as `safetensors` gives it out; on its way to the device it becomes one."""

    def __init__(self, shape: Any, dtype: torch.dtype, place: str = "device") -> None:
        self.shape, self.dtype, self.place = shape, dtype, place

    def __getitem__(self, index: Any) -> OnDisk:
        """The whole of it, which is all that is asked for."""
        return self

    def get_shape(self) -> list[int]:
        """As `safetensors` says it."""
        return list(self.shape)

    def is_floating_point(self) -> bool:
        """As `Tensor` says it."""
        return self.dtype.is_floating_point

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Its copy on the device; a card gets it in its new dtype from the host, where it is cast."""
        dtype, cast = dtype or self.dtype, None
        if dtype != self.dtype and device_kind(META) == "cuda" and self.place == "device":
            with keeping("host"):
                cast = torch.empty(self.shape, dtype=dtype, device=META)
        with keeping(self.place):
            copy = torch.empty(self.shape, dtype=dtype, device=META)
        del cast
        return copy


class Read(OnDisk):
    """A tensor that is read into the host's memory first; on a CPU that is the copy, unless it is cast."""

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """See `OnDisk`."""
        on_card = device_kind(META) == "cuda"
        with keeping("host" if on_card else self.place):
            read = torch.empty(self.shape, dtype=self.dtype, device=META)
        return super().to(device, dtype) if on_card or (dtype or self.dtype) != self.dtype else read


class Known:
    """A small tensor in a file whose values are known, and asked for."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.dtype = value, value.dtype

    def __getitem__(self, index: Any) -> Known:
        """The whole of it, which is all that is asked for."""
        return self

    def is_floating_point(self) -> bool:
        """As `Tensor` says it."""
        return self.dtype.is_floating_point

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """It stays where its values are."""
        return self.value


@contextmanager
def _as_with_data(place: str) -> Iterator[None]:
    """Inside, transformers and bitsandbytes do on the meta device what they would do on the real one."""
    from transformers import core_model_loading, modeling_utils
    from transformers.integrations import bitsandbytes as integration

    bnb = import_bitsandbytes()
    model_class = modeling_utils.PreTrainedModel
    with ExitStack() as stack:
        for name in ("_load_pretrained_model", "_finalize_model_loading"):
            inside = _keeping_in(place, getattr(model_class, name))
            stack.enter_context(patch.object(model_class, name, staticmethod(inside)))
        if device_kind(META) == "cuda" and place == "device":
            stack.enter_context(patch.object(modeling_utils, "caching_allocator_warmup", _warm_up))
        stack.enter_context(patch.object(core_model_loading, "ThreadPoolExecutor", AtOnce))
        stack.enter_context(patch.object(bnb.nn.Params4bit, "to", _quantising(bnb.nn.Params4bit.to)))
        stack.enter_context(patch.object(integration.Bnb8bitQuantize, "convert", _convert_8bit))
        stack.enter_context(patch.object(bnb.nn.Int8Params, "to", _with_scales(bnb.nn.Int8Params.to)))
        yield


def _keeping_in(place: str, part: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with keeping(place):
            return part(*args, **kwargs)

    return inside


def _warm_up(model: Any, device_map: Any, quantizer: Any) -> None:
    """transformers asks the card once for as much as all weights take, so that the allocator has it at hand."""
    from transformers.modeling_utils import get_total_byte_count

    sizes = get_total_byte_count(model, dict.fromkeys(device_map, META), quantizer)
    torch.empty(int(sizes[META] // 2), dtype=torch.float16, device=META)


def _quantising(to: Callable[..., Any]) -> Callable[..., Any]:
    def quantise_or_move(weight: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device == META and not weight.bnb_quantized:
            return weight._quantize(device)
        return to(weight, *args, **kwargs)

    return quantise_or_move


def _with_scales(to: Callable[..., Any]) -> Callable[..., Any]:
    """On their way to the meta device bitsandbytes' 8-bit weights would lose their scales."""

    def move(weight: Any, *args: Any, **kwargs: Any) -> Any:
        moved = to(weight, *args, **kwargs)
        if weight.dtype == torch.int8 and moved.SCB is None:
            moved.SCB = weight.SCB
        return moved

    return move


def _convert_8bit(
    self: Any, input_dict: dict[str, Any], full_layer_name: str | None = None, model: Any = None, **_: Any
) -> dict[str, Any]:
    """transformers' own, in which the weight travels back to the host to be quantised on its way to the device."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import get_module_from_name

    result = {}
    for name, value in input_dict.items():
        value = value[0] if isinstance(value, list) else value
        if issubclass(get_module_from_name(model, name)[0].source_cls, Conv1D):
            value = value.T
        options = dict(model.get_parameter_or_buffer(name).__dict__)
        options.pop("SCB", None)
        with keeping("host" if device_kind(META) == "cuda" else "nowhere"):
            on_host = torch.empty_like(value)
        result[name] = import_bitsandbytes().nn.Int8Params(on_host, requires_grad=False, **options)._quantize(META)
    return result


# -- what lies on the host first --------------------------------------------------------------------------------------


@contextmanager
def from_host(trace: Trace) -> Iterator[None]:
    """Inside, a weight that is loaded on the host is cast there, and copied to the device when it is sent there."""
    real = torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.is_meta and trace.place_of(tensor) == "host":
            asked = {name: value for name, value in kwargs.items() if name != "copy"}  # which this parser refuses
            device, dtype = torch._C._nn._parse_to(*args, **asked)[:2]
            if device == META:
                with keeping("device"):
                    return torch.empty_like(tensor, dtype=dtype or tensor.dtype)
            with keeping("host"):  # a cast
                return real(tensor, *args, **kwargs)
        return real(tensor, *args, **kwargs)

    with patch.object(torch.Tensor, "to", to):
        yield


def move_rest(model: nn.Module) -> None:
    """Send everything to the device that is not there yet (inside `from_host`)."""
    vars(unwrapped(model)).pop("to", None)
    for parameter in model.parameters():
        if parameter.untyped_storage().nbytes() == parameter.nbytes:  # else it lies with others where a strategy put it
            parameter.data = parameter.data.to(META)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(META)
