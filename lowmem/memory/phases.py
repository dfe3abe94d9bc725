"""What a run does beside its steps, without data: loading, evaluating, answering, saving. The real code runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from lowmem import checkpoint, sharded, weights
from lowmem.answers import Prompt, continued, longest_answer, prompt_ids
from lowmem.memory.load import OnDisk, without_bars
from lowmem.memory.trace import Trace
from lowmem.ops.without_data import keeping
from lowmem.run import device_kind

if TYPE_CHECKING:
    from lowmem.trainer import Trainer


@dataclass(frozen=True)
class Answers:
    """Prompts that are answered in one go.

    Attributes:
        rows: how many.
        prompt_length: tokens of the longest one.
        new_tokens: the most that an answer may have.
    """

    rows: int
    prompt_length: int
    new_tokens: int


@dataclass(frozen=True)
class Around:
    """What a run does beside its steps; by default nothing.

    Attributes:
        evaluation: tokens of each row of a batch of an evaluation.
        answers: prompts that are answered before and after training.
        checkpoints: whether checkpoints are saved.
        result: whether the trained weights are saved.
    """

    evaluation: Sequence[int] = ()
    answers: Answers | None = None
    checkpoints: bool = False
    result: bool = False


def follow(trace: Trace, trainer: Trainer, around: Around) -> None:
    """Let a trainer that has trained evaluate, answer and save, while its trace is active."""
    if around.evaluation:
        with trace.during("evaluate"):
            trainer.evaluate([{"input_ids": np.ones(length, np.int32)} for length in around.evaluation])
    if around.answers:
        with trace.during("generate"), trainer.inference() as model:
            answer(model, around.answers)
    if around.checkpoints or around.result:
        trace.mark("save")
        with (
            trace.during("save"),
            without_bars(),
            tempfile.TemporaryDirectory() as folder,
            files_without_data(),
            unknown_is_no(),
        ):
            if around.checkpoints:
                trainer.save_checkpoint(Path(folder, "checkpoint-000002"))
            if around.result:
                trainer.save_model(Path(folder, "model"))


# -- answering --------------------------------------------------------------------------------------------------------


def largest_batch(tokenizer: Any, pairs: Sequence[tuple[Prompt, str]], batch_size: int = 100) -> Answers:
    """The batch of held-out prompts with most tokens, as `answers.ExactMatch` forms batches."""
    lengths = sorted(len(prompt_ids(tokenizer, prompt)) for prompt, _ in pairs)
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    most = max(batches, key=lambda batch: len(batch) * batch[-1])
    return Answers(len(most), most[-1], longest_answer(tokenizer, pairs))


def answer(model: nn.Module, answers: Answers) -> None:
    """The first two tokens of the answers by `generate`, and then the last one, with a cache that is full."""
    rows = [[1] * length for length in (answers.prompt_length, *[answers.prompt_length - 1] * (answers.rows - 1))]
    with unknown_is_no(), _two_tokens(), torch.no_grad():
        continued(model, SimpleNamespace(eos_token_id=0), rows, min(2, answers.new_tokens))
        if answers.new_tokens > 2:
            _last_token(model, answers)


def _last_token(model: Any, answers: Answers) -> None:
    """One more token for rows whose keys and values are in the cache already."""
    device = next(model.parameters()).device
    one = torch.ones(answers.rows, 1, dtype=torch.int64, device=device)
    first = model(input_ids=one, use_cache=True)
    name = "cache" if "cache" in first else "past_key_values"  # as transformers called it before
    cache = first.get(name)
    scores = first.logits[:, -1].to(copy=True, dtype=torch.float32)  # of the token before, still there in `generate`
    del first
    length = answers.prompt_length + answers.new_tokens - 2
    for layer in getattr(cache, "layers", ()):
        if getattr(layer, "keys", None) is None:  # a state whose size does not depend on the length
            continue
        room = getattr(layer, "sliding_window", None)
        kept = min(length, room - 1) if room else length
        for part in ("keys", "values"):
            before = getattr(layer, part)
            setattr(layer, part, before.new_empty((*before.shape[:2], kept, before.shape[3])))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
    mask = torch.ones(answers.rows, length + 1, dtype=torch.int64, device=device)
    output = model(input_ids=one, attention_mask=mask, use_cache=True, logits_to_keep=1, **{name: cache})
    scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
    scores.argmax(-1)


@contextmanager
def unknown_is_no() -> Iterator[None]:
    """Inside, a question about a value that is not there is answered with no: rows are padded, nobody is finished."""
    with ExitStack() as stack:
        for name, no in (("__bool__", False), ("item", 0.0)):
            answer_of = _unless_unknown(getattr(torch.Tensor, name), no)
            stack.enter_context(patch.object(torch.Tensor, name, answer_of))
        yield


def _unless_unknown(real: Callable[[Tensor], Any], no: Any) -> Callable[[Tensor], Any]:
    return lambda tensor: no if tensor.is_meta else real(tensor)


@contextmanager
def _two_tokens() -> Iterator[None]:
    """Inside, `generate` ends after two tokens, as no stop token will be seen."""
    from transformers import GenerationMixin

    goes_on, passes = GenerationMixin._has_unfinished_sequences, count()

    def unfinished(self: Any, done: bool, *args: Any, **kwargs: Any) -> bool:
        return bool(goes_on(self, next(passes) >= 2, *args, **kwargs))

    with patch.object(GenerationMixin, "_has_unfinished_sequences", unfinished):
        yield


# -- saving -----------------------------------------------------------------------------------------------------------


@contextmanager
def files_without_data() -> Iterator[dict[Path, dict[str, OnDisk]]]:
    """Inside, weights and states are copied to the host as they are for a file; the file stays empty.

    Gives a dictionary that is filled with what the safetensors files would hold.
    """
    import transformers.modeling_utils
    from peft import peft_model

    written: dict[Path, dict[str, OnDisk]] = {}

    def safetensors(tensors: Mapping[str, Tensor], path: str | Path, metadata: Any = None) -> None:
        """safetensors 0.8: the copies of all tensors of a file live together, then they are written."""
        copies = [_on_host(tensor) for tensor in tensors.values()]
        Path(path).touch()
        written[Path(path)] = {name: OnDisk(t.shape, t.dtype) for name, t in tensors.items()}
        del copies

    with ExitStack() as stack:
        for module, name in (
            (weights, "save_file"),
            (peft_model, "safe_save_file"),
            (transformers.modeling_utils, "safe_save_file"),
        ):
            stack.enter_context(patch.object(module, name, safetensors))
        stack.enter_context(patch.object(sharded, "to_host", _whole_on_host))
        stack.enter_context(patch.object(peft_model, "id_tensor_storage", lambda t: t.untyped_storage()._cdata))
        stack.enter_context(patch.object(checkpoint, "_save", _state))
        yield written


def _state(value: Any, path: Path) -> None:
    """`torch.save`: one storage after the other."""
    for tensor in checkpoint._tensors(value):
        _on_host(tensor)
    path.touch()


def _whole_on_host(tensor: Tensor) -> Tensor:
    """The copy that rank 0 makes of a tensor which was put together to be saved."""
    copy = _on_host(tensor)
    return tensor if copy is None else copy


def _on_host(tensor: Tensor) -> Tensor | None:
    """The copy of a card's tensor; what lies on the host already, or can be read from there, needs none."""
    if not tensor.is_meta or device_kind(tensor.device) == "cpu" or getattr(tensor, "is_paged", False):
        return None
    with keeping("host"):
        return torch.empty_like(tensor)
