"""A run's memory before, during and after training: will it fit, what is it made of, what would help."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from lowmem.config import ModelConfig
from lowmem.data import prompts_and_answers
from lowmem.environment import same_random_numbers
from lowmem.errors import ExplainedError, UserError
from lowmem.interrupts import Terminated
from lowmem.memory import segments
from lowmem.memory.bound import upper_bound
from lowmem.memory.estimate import Estimate, estimate
from lowmem.memory.free import free_memory
from lowmem.memory.meta import Device
from lowmem.memory.now import resident_bytes
from lowmem.memory.phases import largest_batch
from lowmem.memory.remedies import Remedy, needed_bytes, remedies
from lowmem.memory.subject import Subject, model_config
from lowmem.memory.trace import Trace
from lowmem.memory.worst_batch import Lengths, WorstBatches, heaviest, longest_eval_batch, worst_batches
from lowmem.sizes import gib
from lowmem.strategy import Strategy

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

MemoryCheck = Literal["off", "warn", "refuse"]
_SURELY = 0.8  # of what is free: a bound below passes without a prediction
_STEP = ("at rest", "forward", "backward", "step")  # phases that every optimizer step has
_TOLERANCE = 0.03  # of what is predicted


class MemoryGuard:
    """Predicts the run of a trainer before its weights are loaded.

    Args:
        trainer: its numbers, rows and strategies are there, its model is not.
        model: what it will train: a name, or a module in memory.

    Attributes:
        prediction: for the worst batch, where it was made.
    """

    def __init__(self, trainer: Trainer, model: ModelConfig | nn.Module | None) -> None:
        self.trainer = trainer
        self.prediction: Estimate | None = None
        self._model = model
        self._subject: Subject | None = None
        self._plain: Subject | None = None
        self._strategies: list[Strategy] | None = None
        if trainer.device.type != "meta":
            with suppress(Exception):  # an object of the user's that cannot be copied: then nothing is predicted
                self._strategies = copy.deepcopy(trainer.given)  # as they are before anything is built
                if isinstance(model, nn.Module):
                    self._plain = Subject.of_module(model, trainer.training, self._strategies)

    @property
    def kind(self) -> Device:
        """What the run is predicted for."""
        return "cuda" if self.trainer.device.type == "cuda" else "cpu"

    @property
    def subject(self) -> Subject:
        """The run.

        Raises:
            UserError: it cannot be predicted.
        """
        if self._subject is None:
            self._subject = self._with_data(self.before_data())
        return self._subject

    def before_data(self) -> Subject:
        """The run, without what it does beside its steps; while nothing is built, a run without data has one, too.

        Raises:
            UserError: it cannot be predicted.
        """
        other = [strategy.name for strategy in self.trainer.strategies if not strategy.predictable]
        if other:
            raise UserError(f"{other[0]} allocates in a way of its own")
        plain, training = self._plain, self.trainer.training
        if isinstance(self._model, ModelConfig) and self._strategies is not None:
            plain = Subject.of_config(model_config(self._model), self._model, training, self._strategies)
        elif self.trainer.device.type == "meta" and isinstance(self._model, nn.Module):
            plain = Subject.of_module(self._model, training, copy.deepcopy(self.trainer.given))
        if plain is None:
            raise UserError("the model or a strategy cannot be copied")
        return replace(plain, gpus=self.trainer.world.size)

    def _with_data(self, subject: Subject) -> Subject:
        """What is evaluated and answered beside training, by its real lengths."""
        trainer, answers = self.trainer, None
        asked, rows = trainer.data.exact_match, trainer.eval_dataset
        if asked is not None and trainer.tokenizer is not None:
            answers = largest_batch(trainer.tokenizer, prompts_and_answers(asked, trainer.data))
        evaluation = () if rows is None else longest_eval_batch(rows, trainer.training.eval_batch_size)
        return replace(subject, data=trainer.data, answers=answers, evaluation=evaluation)

    @property
    def worst(self) -> WorstBatches:
        """The batches that may need most."""
        return worst_batches(self.trainer.train_dataset, self.trainer.training)

    def predict(self, lengths: Lengths) -> Estimate:
        """What the run needs whose batches are like this one.

        Args:
            lengths: tokens of each row of an optimizer batch.

        Raises:
            UserError: it cannot be predicted.
        """
        with self._apart():
            used = segments.will_be_used()
            return estimate(self.subject, lengths=lengths, device=self.kind, expandable_segments=used)

    def trace(self, lengths: Lengths) -> Trace:
        """Two steps on such a batch, and nothing before or after them.

        Raises:
            UserError: it cannot be predicted.
        """
        with self._apart():
            return self.subject.trace(lengths, self.kind)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A run on the meta device leaves no traces in this one; its errors become one line."""
        try:
            with same_random_numbers(self.trainer.device):
                yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # its words are those of the run on the meta device
        except Terminated:
            raise Terminated from None
        except Exception as error:  # whatever code raises that looks at its data
            raise UserError(" ".join(str(error).split())[:200] or type(error).__name__) from error

    def check(self, wanted: MemoryCheck) -> None:
        """Refuse a run that will not fit, or say so; one that cannot be predicted gets a notice.

        Raises:
            ExplainedError: it will not fit, and `wanted` is `refuse`.
        """
        trainer = self.trainer
        if wanted == "off" or trainer.device.type == "meta" or trainer.train_dataset is None:
            return
        worst, free = self.worst, free_memory(trainer.device)
        try:
            with self._apart():
                if self._surely_fits(worst.batches, free):
                    return
                batch = heaviest(self.subject, worst.batches, self.kind)
            found = self.prediction = self.predict(batch)
        except UserError as error:
            trainer.run.notice(f"memory: not predicted before training ({error}); whether it fits will be seen")
            return
        self._look_at_the_host(found)
        needed = needed_bytes(found)
        if needed <= free:
            if needed * (1 + _TOLERANCE) > free:
                trainer.run.notice(f"memory: a close fit, {gib(needed)} predicted and {gib(free)} free")
        elif wanted == "warn":
            trainer.run.notice(f"memory: predicted not to fit, {gib(needed)} needed and {gib(free)} free")
        else:
            raise ExplainedError(self._refusal(found, worst.words, free))

    def remedies(
        self, lengths: Lengths, capacity: int | None, needed: int | None = None, floor: int = 0
    ) -> list[Remedy]:
        """What would help, each tried by prediction; the arguments are those of `remedies.remedies`.

        Raises:
            UserError: it cannot be predicted.
        """
        with self._apart():
            used = segments.will_be_used()
            kind = self.kind
            return remedies(
                self.subject, lengths, capacity, device=kind, expandable_segments=used, needed=needed, floor=floor
            )

    def _look_at_the_host(self, found: Estimate) -> None:
        """On a card, the host's memory is a budget of its own; pages may go to a disk, so nothing is refused."""
        if found.device == "cuda":
            wanted = max(sum(held.values()) for phase, held in found.host_phases.items() if phase != "merge")
            free = free_memory(torch.device("cpu")) + resident_bytes()
            if wanted > free:
                self.trainer.run.notice(f"memory: the host needs {gib(wanted)}, and {gib(free)} of it are free")

    def _surely_fits(self, batches: Sequence[Lengths], free: int) -> bool:
        """A bound far above what any strategy needs is below what is free: no prediction is made (it takes seconds)."""
        training = self.trainer.training
        padded = [*batches]
        if self.subject.evaluation:
            padded.append(self.subject.evaluation)
        tokens = max(len(batch) * max(batch) for batch in padded)
        return (
            upper_bound(self.subject.make_model(None), tokens, training.max_length, self.subject.answers)
            <= _SURELY * free
        )

    def _refusal(self, found: Estimate, words: str, free: int) -> str:
        needed = needed_bytes(found)
        where = "on the card" if self.kind == "cuda" else "in this machine's memory"
        lines = [
            f"this run will not fit: {gib(needed)} needed, {gib(free)} free {where} (lowmem train --force, or "
            "Trainer(check_memory='warn'), trains anyway)",
            f"  predicted for {words}: {len(found.lengths)} rows of up to {max(found.lengths):,} tokens",
            f"  at the peak, in {found.phase}{f', {found.place}' if found.place else ''}: {held_words(found)}",
        ]
        beside = {name: m.bytes for name, m in found.phases.items() if name not in _STEP}
        floor = max(beside.values(), default=0)
        if floor > free:
            lines.append(f"  {max(beside, key=lambda name: beside[name])} alone needs {gib(floor)}")
        return "\n".join([*lines, *remedy_lines(self.remedies(found.lengths, free, needed, floor), fitting=True)])


def held_words(found: Estimate) -> str:
    """What holds memory at the peak of a prediction; a CPU's allocator has no slack of the kind that is predicted."""
    return ledger_words({n: b for n, b in found.ledger.items() if found.device == "cuda" or n != "allocator slack"})


def ledger_words(ledger: dict[str, int], most: int = 6) -> str:
    """The largest categories in one line; below a thousandth of all they are left out."""
    rows = sorted(ledger.items(), key=lambda row: -row[1])
    least = sum(ledger.values()) / 1000
    shown = [f"{name} {gib(size)}" for name, size in rows[:most] if size > least]
    rest = sum(size for _, size in rows[most:])
    return ", ".join([*shown, f"others {gib(rest)}"] if rest > least else shown)


def remedy_lines(found: Sequence[Remedy], *, fitting: bool) -> list[str]:
    """What would help, a line each.

    Args:
        found: of `remedies`.
        fitting: say which of them is enough.
    """
    enough = [remedy for remedy in found if remedy.fits]
    lines = [
        f"  would fit with {remedy.words}: {gib(remedy.needed)} (saves {gib(remedy.saved)})" for remedy in enough[:1]
    ]
    if fitting and not enough:
        lines.append("  nothing tried is enough: a shorter training.max_length, a smaller model, or a larger card")
    others = [f"{remedy.words} saves {gib(remedy.saved)}" for remedy in found if not remedy.fits]
    return lines + ([f"  {'not enough alone' if enough else 'would help'}: {'; '.join(others)}"] if others else [])
