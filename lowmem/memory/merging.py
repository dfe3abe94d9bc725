"""What `lowmem merge` needs of the host's memory: the real job, on a model of few layers, without data."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lowmem import adapter_layers, base_weights, merge, weights
from lowmem.errors import UserError
from lowmem.memory.load import META, OnDisk, files_of
from lowmem.memory.meta import on_meta
from lowmem.memory.phases import files_without_data, unknown_is_no
from lowmem.memory.predict import steps_alone
from lowmem.memory.trace import Trace
from lowmem.ops.without_data import keeping
from lowmem.strategy import Stage

if TYPE_CHECKING:
    from lowmem.memory.subject import Subject


def merge_trace(subject: Subject) -> Trace | None:
    """The tensors of a merge (`--no-probe`): the same for every layer, so that few of them tell.

    The base is read from mapped files; its pages are counted while they are read. Where it was quantised, this is what
    a machine without a card needs.

    Args:
        subject: the run whose adapter is merged.

    Returns:
        The trace (device `cpu`); None where nothing is merged, or the kind of adapter cannot be.
    """
    from lowmem.recipe import Recipe
    from lowmem.trainer import Trainer

    if subject.source is None or not any(s.stage is Stage.ADAPT for s in subject.strategies):
        return None
    with on_meta("cpu"), tempfile.TemporaryDirectory() as folder:
        model = subject.make_model(subject.shallow)
        config = copy.deepcopy(model.config)
        rows = [{"input_ids": np.ones(2, np.int32)}]
        strategies = copy.deepcopy(list(subject.strategies))
        trainer = Trainer(model, rows, training=steps_alone(subject.training), strategies=strategies)
        if not hasattr(trainer.model, "peft_config"):
            return None
        with files_without_data() as written, unknown_is_no():
            trainer.save_model(folder)
        recipe: Any = Recipe(subject.source, training=subject.training, strategies=strategies)
        run: Any = SimpleNamespace(recipe=recipe, path=Path(folder), weights=lambda checkpoint: (Path(folder), None))
        trace = Trace("cpu")
        with trace, trace.during("merge"), unknown_is_no(), _without_data(config, written):
            try:
                with keeping("nowhere"):  # skeletons
                    job = merge._Job(run, None, "auto", None)
            except UserError:
                return None  # the command says why
            for _ in job.tensors():
                pass
    return trace


@contextmanager
def _without_data(config: Any, written: dict[Path, dict[str, OnDisk]]) -> Iterator[None]:
    def open_weights(load: Any, model: Any, needed: set[str], tied: Any) -> tuple[base_weights.Weights, None]:
        return ShapesOnly(model, needed), None

    with ExitStack() as stack:
        for module, name, value in (
            (merge, "base_config", lambda run: config),
            (merge, "pick_device", lambda model: META),
            (merge, "open_weights", open_weights),
            (adapter_layers, "open_safetensors", lambda path: _File(written[path])),
            (weights, "open_safetensors", lambda path: _File(written[path])),
            (merge, "copy", SimpleNamespace(deepcopy=_nowhere(copy.deepcopy))),
            (torch.nn.Module, "to_empty", _nowhere(torch.nn.Module.to_empty)),
            (torch.Tensor, "cpu", lambda tensor: tensor),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def _nowhere(part: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with keeping("nowhere"):
            return part(*args, **kwargs)

    return inside


class ShapesOnly(base_weights.Weights):
    """The tensors in a model's files; all of them are in memory where some cannot be found one by one."""

    def __init__(self, model: Any, needed: set[str]) -> None:
        self.stored = files_of(model)
        names = {name for name, _ in model.state_dict().items()}
        keys = {key: key for key in self.stored if key in names}
        super().__init__(keys, sorted(self.stored.keys() - keys.keys()), dtype=model.dtype)
        self.whole = [self.read(key) for key in self.stored] if needed - keys.keys() else []

    def read(self, key: str) -> Tensor:
        """See `Weights`."""
        return self.stored[key].to(META)

    @property
    def num_bytes(self) -> int:
        """See `Weights`."""
        return sum(t.shape.numel() * t.dtype.itemsize for t in self.stored.values())


class _File:
    """What `safetensors.safe_open` gives."""

    def __init__(self, tensors: dict[str, OnDisk]) -> None:
        self.tensors = tensors

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_tensor(self, key: str) -> Tensor:
        return self.tensors[key].to(META)

    def get_slice(self, key: str) -> OnDisk:
        return self.tensors[key]
