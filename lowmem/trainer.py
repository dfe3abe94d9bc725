"""The trainer: build the plain parts, let the strategies wrap them, run the textbook loop. It knows no technique."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lowmem import checkpoint
from lowmem.adapters import refuse_adapter
from lowmem.answers import ExactMatch
from lowmem.batches import make_cursor, to_device
from lowmem.bookkeeping import Bookkeeping
from lowmem.checks import (
    require_eval_rows,
    require_finite,
    require_known_tokens,
    require_positions,
    require_shared_work,
    require_trainable,
)
from lowmem.config import DataConfig, LoadConfig, ModelConfig, TrainingConfig
from lowmem.data import TokenizedDataset, tokenize
from lowmem.data.stream import open_training_rows, require_length
from lowmem.errors import UserError
from lowmem.evaluation import summed_loss
from lowmem.interrupts import Interrupts
from lowmem.loading import load_model, load_tokenizer, raise_trainable_dtype
from lowmem.loss import count, next_token_cross_entropy, num_targets
from lowmem.memory.guard import MemoryCheck, MemoryGuard
from lowmem.memory.segments import prepare_allocator
from lowmem.nonfinite import NonFiniteGuard
from lowmem.observers import Event, Observer, built_in_observers, heard_here
from lowmem.run import Run, number, pick_device
from lowmem.schedule import lr_lambda
from lowmem.strategies import with_defaults
from lowmem.strategy import Sample, Strategy, resolve, traits
from lowmem.weights import load_weights, save_pretrained
from lowmem.world import World


class Trainer:
    """Fine-tunes a causal language model; the memory techniques are the strategies it is given.

    Args:
        model: hub id, local folder or GGUF file (a string, path or `ModelConfig`), or a module in memory.
        train_dataset: a path (JSON, JSONL, text), a `datasets.Dataset`, or a list of dicts; rows may be tokenised. A
            `datasets.IterableDataset`, any iterable without a length, or a function that returns one, is a stream.
        eval_dataset: the same, for `evaluate`, but no stream.
        tokenizer: a transformers tokenizer; by default the one beside the weights.
        training: the numbers.
        strategies: in any order; `AdamW` and, for `max_grad_norm`, `GradientClipping` are added where missing.
        observers: callables that are shown every `Event`.
        data: how rows are read (`format`, `train_on`, `on_bad_row`), and files where no data set is given.
        check_memory: before loading, predict what the longest batch needs: `refuse` a run that will not fit, `warn`.

    Raises:
        UserError: strategies that conflict, data without a supervised token, settings that have no effect.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | nn.Module,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        training: TrainingConfig | None = None,
        strategies: Sequence[Strategy] = (),
        observers: Sequence[Observer] = (),
        data: DataConfig | None = None,
        check_memory: MemoryCheck = "off",
    ) -> None:
        self.started = time.perf_counter()
        self.training, self.data = training or TrainingConfig(), data or DataConfig()
        self.given = list(strategies)
        self.strategies = resolve(with_defaults(self.given, self.training))
        self.device = pick_device(model)
        self.world = World.start(self.device)
        self.run = Run(self.training, self.device, traits(self.strategies)[0], self.world)
        self.observers = heard_here([*observers, *built_in_observers(self.training, self.world)], self.world)
        prepare_allocator(self.run)
        torch.manual_seed(self.training.seed)

        named = ModelConfig(str(model)) if isinstance(model, str | Path) else model
        self.source = named if isinstance(named, ModelConfig) else None
        refuse_adapter(self.source)
        self.memory = MemoryGuard(self, named)
        self.run.subject = self.memory.before_data
        load = self._wrap("configure", LoadConfig.of(self.source, self.device))
        require_shared_work(self.run, self.strategies)
        self.tokenizer = load_tokenizer(self.source) if tokenizer is None and self.source else tokenizer
        rows = train_dataset if train_dataset is not None else self.data.train
        held_out = eval_dataset if eval_dataset is not None else self.data.eval
        self.train_dataset = open_training_rows(
            rows, self.tokenizer, self.data, self.training, evaluated=held_out is not None
        )
        self.eval_dataset = self._tokenize(held_out)
        require_eval_rows(self.training, self.eval_dataset)
        self.memory.check(check_memory)

        plain = named.to(load.device) if isinstance(named, nn.Module) else load_model(load)
        self.model = self.run.model = self._wrap("wrap_model", plain)
        for tokenized in (self.train_dataset, self.eval_dataset):
            require_positions(self.model, tokenized, self.training.max_length)
            require_known_tokens(self.model, tokenized)
        raise_trainable_dtype(self.model, load.trainable_dtype)
        self.run.trainable = require_trainable(self.model)
        self.loss = self._wrap("wrap_loss", next_token_cross_entropy)
        make = self._wrap("wrap_optimizer", _no_optimizer)
        self.optimizer = self.run.optimizer = make(list(self.run.trainable.values()))
        self.guard = guard = NonFiniteGuard(self)
        loop = self.run.loop or self._forward_backward
        self.forward_backward = guard.around_pass(self._wrap("wrap_forward_backward", loop))
        self.step = guard.around_step(self._wrap("wrap_step", self._step))
        self.inference = self._wrap("wrap_inference", self._inference)

        self.cursor = make_cursor(self.train_dataset, self.training)
        self.total_steps = self.cursor.total_steps(self.training.max_steps, self.training.num_train_epochs)
        self.scheduler = LambdaLR(self.optimizer, lr_lambda(self.training, self.total_steps))
        self.tokens = self.supervised_tokens = 0
        self.result: dict[str, Any] = {}
        self.books, self.interrupts = Bookkeeping(self), Interrupts(self.run)

    @classmethod
    def from_recipe(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        observers: Sequence[Observer] = (),
        check_memory: MemoryCheck = "off",
    ) -> Trainer:
        """A trainer from a YAML recipe, with dotted overrides such as `training.learning_rate=1e-4`."""
        from lowmem.recipe import load_recipe

        recipe = load_recipe(path, overrides)
        own: list[Observer] = [ExactMatch(recipe.data.exact_match)] if recipe.data.exact_match else []
        everyone = [*own, *observers]
        numbers, strategies = recipe.training, recipe.strategies
        return cls(recipe.model, None, None, None, numbers, strategies, everyone, recipe.data, check_memory)

    def _wrap(self, method: str, part: Any) -> Any:
        for strategy in self.strategies:  # inner to outer
            part = getattr(strategy, method)(part, self.run)
        return part

    # -- the textbook loop --------------------------------------------------------------------------------------------

    def train(self, resume_from: str | Path | bool | None = None) -> dict[str, Any]:
        """Train to the end, and return what `result.json` says.

        In the main thread, Ctrl-C and SIGTERM end the run after the step at hand: what it has is saved, where there is
        an `output_dir`, before the exception is raised. A second one ends it at once.

        Args:
            resume_from: a checkpoint folder, a run folder (its newest checkpoint), or true for the newest one of
                `output_dir`.

        Raises:
            UserError: nothing to train on, a loss that is not finite, weights that do not move, a bad checkpoint.
            KeyboardInterrupt: after Ctrl-C; the message says how to go on.
            SystemExit: after SIGTERM, with the code 143.
        """
        if self.train_dataset is None:
            raise UserError("train: there is no train_dataset")
        with self.world.explained(), self.books.open(resume_from):
            self.emit("begin", step=self.run.global_step, total_steps=self.total_steps)
            with self.interrupts:
                self._loop()
        return self.result

    def _loop(self) -> None:
        start, first_update = time.perf_counter(), self.books.checks.begin()
        self.model.train()
        batches = self.cursor.batches()
        while self.run.global_step < self.total_steps and not self.run.stopped:
            batch = next(batches)
            self.run.metrics = {"learning_rate": self.optimizer.param_groups[0]["lr"]}
            loss = self.forward_backward([batch], count(batch))
            self.run.log(loss=loss)
            self.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.run.global_step += 1
            first_update.check()
            self._account(batch, time.perf_counter() - start)
        self.model.eval()
        self.books.finish(time.perf_counter() - start)

    def _forward_backward(self, micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
        """Mean loss of the batch; its gradient, too, while gradients are on."""
        total = torch.zeros((), device=self.device)
        for inputs in to_device(micro_batches, self.device):
            loss = self.loss(self.model, inputs) / divisor
            if torch.is_grad_enabled():
                loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total

    def _step(self) -> None:
        require_finite(self.run)  # inside: an overflow that the loss scaler skips never comes here
        self.optimizer.step()
        self.scheduler.step()  # inside: a skipped step does not advance the schedule

    @contextmanager
    def _inference(self) -> Iterator[nn.Module]:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self.model.train(training)

    # -- evaluation, saving, bookkeeping ------------------------------------------------------------------------------

    def evaluate(self, dataset: Any = None) -> dict[str, float]:
        """Loss per target token, and what it was measured on.

        Args:
            dataset: as `eval_dataset`, which is the default.

        Returns:
            `eval_loss` (nats per unit of loss weight), `eval_tokens` (target tokens), `eval_seconds`.
        """
        rows = self._tokenize(dataset) if dataset is not None else self.eval_dataset
        if rows is None:
            raise UserError("evaluate: there is no eval_dataset")
        start = time.perf_counter()
        with self.inference():
            total, weight, targets = summed_loss(
                self.forward_backward, rows, self.training.eval_batch_size, self.interrupts.check
            )
        return {"eval_loss": total / weight, "eval_tokens": targets, "eval_seconds": time.perf_counter() - start}

    def save_model(self, folder: str | Path) -> Path:
        """Write the weights as evaluation sees them: an adapter in peft's format, or a model in transformers'."""
        with self.inference() as model:
            save_pretrained(model, self.tokenizer, Path(folder), self.world)
        return Path(folder)

    def save_checkpoint(self, folder: Path) -> None:
        """Write all that a run needs to go on as if it had never stopped."""
        record = {
            "step": self.run.global_step,
            "cursor": self.cursor.state_dict(),
            "scheduler": self.scheduler.last_epoch,
            "tokens": [self.tokens, self.supervised_tokens],
            **self.books.record(),
        }
        checkpoint.save(folder, self.run, self.optimizer, self.strategies, record)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Take back what `save_checkpoint` wrote; the learning rate follows the training numbers given now."""
        record, notices = checkpoint.load(folder, self.run, self.optimizer, self.strategies)
        self.run.global_step = record["step"]
        self.cursor.load_state_dict(record["cursor"])
        self.tokens, self.supervised_tokens = record["tokens"]
        self.scheduler.last_epoch = record["scheduler"]
        for group, base, factor in zip(
            self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(record["scheduler"])
        for notice in notices:
            self.run.notice(notice)
        return record

    def load_model(self, folder: Path) -> None:
        """Take the weights of a checkpoint, and what strategies keep beside them (averages); nothing else."""
        checkpoint.verify_checkpoint(folder)
        load_weights(self.model, folder, self.world)
        checkpoint.load_strategies(folder, self.strategies)

    def emit(self, kind: Any, **metrics: Any) -> None:
        """Show an event to every observer, and first the notices that came up since the last one."""
        for text in self.run.take_notices():
            self.emit("notice", text=text)
        event = Event(kind, self, metrics)
        for observer in self.observers:
            observer(event)

    def _account(self, batch: list[Sample], seconds: float) -> None:
        self.tokens += sum(len(sample["input_ids"]) for sample in batch)
        self.supervised_tokens += sum(map(num_targets, batch))
        metrics = {k: number(v) for k, v in self.run.metrics.items()}
        metrics |= {"step": self.run.global_step, "epoch": self.cursor.epochs_done, "seconds": seconds}
        metrics |= {"tokens": self.tokens, "supervised_tokens": self.supervised_tokens}
        self.interrupts.agree()
        self.world.beat(self.run.global_step)
        self.emit("step", **metrics)
        self.books.after_step(metrics)

    def _tokenize(self, source: Any) -> TokenizedDataset | None:
        if source is None:
            return None
        require_length(source)
        return tokenize(source, self.tokenizer, self.data, self.training.max_length)


def _no_optimizer(parameters: list[nn.Parameter]) -> Any:
    raise AssertionError("the optimizer slot is always filled by with_defaults")
