"""The numbers of a run: plain dataclasses without logic. Their fields are the keys of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lowmem.errors import UserError

Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model is loaded, and how (recipe block `model`).

    Attributes:
        name_or_path: hub id, local folder, or GGUF file.
        revision: branch, tag or commit on the hub; null is the default branch.
        dtype: dtype of the frozen weights; `auto` keeps the checkpoint's. Trainable 16-bit weights are raised to
            float32 whatever stands here, unless `pure_bf16` is among the strategies.
        attn_implementation: as in transformers; null lets transformers choose.
        trust_remote_code: run modelling code that comes with the weights.
        add_tokens: special tokens that the tokenizer gets in addition. The embedding and the head grow where they must;
            the new rows start as the mean of the others. With lora they are trained (`modules_to_save`, or else those
            rows alone).
        chat_template: a Jinja template, or a file of one, in place of the tokenizer's; it is saved with the result.
    """

    name_or_path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    add_tokens: list[str] | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        tokens = self.add_tokens
        if tokens is not None and (not tokens or not all(tokens) or len(set(tokens)) < len(tokens)):
            raise UserError(f"model.add_tokens: a list of different, non-empty texts; got {tokens}")


@dataclass(frozen=True)
class WeightedPath:
    """One source of rows, and how it is read.

    Attributes:
        path: a data file, a folder of them, a pattern (`data/*.jsonl`), or a hub id.
        weight: passes over its rows per epoch, above 0 (2.0: every row twice; 0.5: every second row). In a stream: rows
            taken from it, relative to the others.
        revision: branch, tag or commit of a hub data set; null is the default branch.
        name: configuration of a hub data set (a language, say); null is the default one.
        split: split of a hub data set or of a saved one; null is `train` for the hub.
        whole_file: every file, whatever its suffix, is one document of plain text.
    """

    path: str
    weight: float = 1.0
    revision: str | None = None
    name: str | None = None
    split: str | None = None
    whole_file: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UserError(f"a weight is a number above 0; got {self.weight} for {self.path}")


@dataclass(frozen=True)
class DataConfig:
    """What the model learns from (recipe block `data`).

    Attributes:
        train: a path (JSON, JSONL, CSV, TSV, Parquet, text; also .gz, folders and patterns), a hub id, one of these
            with its settings (weight, revision, split, ...), or a list.
        eval: the same, for the evaluation loss; null evaluates nothing.
        exact_match: prompts with reference answers (chat, instruction or prompt/completion rows). The model answers
            them greedily before and after training, and the share of equal answers is reported.
        format: how a row is read; `auto` decides by its keys. `preference_chosen` learns the chosen answers of
            preference rows, which `auto` refuses.
        train_on: `completions` supervises answers only, `everything` every token. Null: completions where a row has a
            prompt, everything for plain text.
        on_bad_row: `error` stops at a row that cannot be read, `skip` counts it and goes on.
        num_workers: processes that tokenise; 0 is this one alone. Null: this one, and after two seconds of work one per
            CPU, at most four.
        cache_dir: where tokenised rows of files are kept for the next run; a relative path starts from the current
            directory. Null: `~/.cache/lowmem/tokenized`, for files of 4 MiB or more.
        streaming: read `train` (files, hub ids) row by row while training; needs `max_steps`.
        shuffle_buffer: rows of a stream among which the next one is drawn. Null: 1,000 with `training.shuffle`.
    """

    train: str | list[str | WeightedPath] | WeightedPath | None = None
    eval: str | list[str | WeightedPath] | WeightedPath | None = None
    exact_match: str | None = None
    format: Literal[
        "auto", "messages", "sharegpt", "instruction", "prompt_completion", "text", "tokens", "preference_chosen"
    ] = "auto"
    train_on: Literal["completions", "everything"] | None = None
    on_bad_row: Literal["error", "skip"] = "error"
    num_workers: int | None = None
    cache_dir: str | None = None
    streaming: bool = False
    shuffle_buffer: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 0:
            raise UserError(f"data.num_workers: a number of processes, 0 or more; got {self.num_workers}")
        if self.shuffle_buffer is not None and self.shuffle_buffer < 2:
            raise UserError(f"data.shuffle_buffer: a number of rows, 2 or more; got {self.shuffle_buffer}")


@dataclass(frozen=True)
class TrainingConfig:
    """What is computed (recipe block `training`); no strategy changes it.

    Names and meanings are those of transformers' `TrainingArguments`, except `batch_size` (rows per optimizer step
    over all devices) and `max_length` (tokens; longer rows are cut).

    Attributes:
        batch_size: rows per optimizer step.
        eval_batch_size: rows per forward pass of an evaluation.
        learning_rate: peak learning rate.
        lr_scheduler_type: shape of the schedule after the warm-up.
        warmup_ratio: share of all optimizer steps spent warming up; not together with `warmup_steps`.
        warmup_steps: optimizer steps spent warming up.
        weight_decay: decoupled weight decay of tensors with two or more dimensions (norms and biases are spared).
        max_grad_norm: global norm to which gradients are clipped; null switches clipping off.
        num_train_epochs: passes over the training rows (may be a fraction).
        max_steps: optimizer steps; overrides `num_train_epochs`.
        max_length: longest row, in tokens.
        seed: seeds the data order, dropout and new weights.
        shuffle: a new order of rows every epoch.
        output_dir: the run folder; null writes nothing.
        logging_steps: optimizer steps between two logged lines.
        eval_steps: optimizer steps between two evaluations; null evaluates once, at the end.
        save_steps: optimizer steps between two checkpoints; null saves none.
        save_total_limit: how many checkpoints are kept (the best and the newest always are).
        metric_for_best_model: evaluation metric that names the best checkpoint (`eval_loss`).
        load_best_model_at_end: the weights of the best checkpoint are the result of the run.
        early_stopping_patience: evaluations in a row without a lower loss that end the run; null: it never ends so.
        early_stopping_threshold: how much lower the evaluation loss must be than the lowest so far, to count.
        on_nonfinite: at a loss or gradient that is NaN or infinite, `stop` ends the run, `skip` leaves the step out.
            Both write the batch to the run folder.
        max_nonfinite_steps: under `skip`, how many steps in a row may be left out; null means 5.
        report_to: trackers that are shown the logged numbers: `tensorboard` (files in the run folder), `wandb`,
            `trackio`.
    """

    batch_size: int = 8
    eval_batch_size: int = 8
    learning_rate: float = 5e-5
    lr_scheduler_type: Scheduler = "linear"
    warmup_ratio: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    num_train_epochs: float = 1.0
    max_steps: int | None = None
    max_length: int = 1024
    seed: int = 42
    shuffle: bool = True
    output_dir: str | None = None
    logging_steps: int = 10
    eval_steps: int | None = None
    save_steps: int | None = None
    save_total_limit: int | None = None
    metric_for_best_model: str | None = None
    load_best_model_at_end: bool = False
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_nonfinite_steps: int | None = None
    report_to: list[TrackerName] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("batch_size", "eval_batch_size", "logging_steps", "max_length"):
            _positive(name, getattr(self, name))
        for name in (
            *("max_steps", "eval_steps", "save_steps", "save_total_limit", "max_grad_norm"),
            *("early_stopping_patience", "max_nonfinite_steps"),
        ):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        _positive("num_train_epochs", self.num_train_epochs)
        if self.max_length < 2:
            raise UserError("training.max_length: at least 2 tokens are needed to predict one; got 1")
        if self.learning_rate < 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise UserError("training: learning_rate, weight_decay and warmup_steps cannot be negative")
        if not 0 <= self.warmup_ratio < 1:
            raise UserError(f"training.warmup_ratio: a share from 0 to below 1; got {self.warmup_ratio}")
        if self.warmup_ratio and self.warmup_steps:
            raise UserError("training: give warmup_ratio or warmup_steps, not both")
        if self.lr_scheduler_type == "constant" and (self.warmup_ratio or self.warmup_steps):
            raise UserError(
                "training.lr_scheduler_type: constant has no warm-up; use constant_with_warmup, or drop the warm-up"
            )
        if self.metric_for_best_model not in (None, "eval_loss"):
            raise UserError(
                f"training.metric_for_best_model: only eval_loss is measured; got {self.metric_for_best_model}"
            )
        if self.save_total_limit and not self.save_steps:
            raise UserError("training.save_total_limit: has no effect without save_steps")
        self._check_best()
        self._check_early_stopping()
        if self.max_nonfinite_steps is not None and self.on_nonfinite != "skip":
            raise UserError("training.max_nonfinite_steps: has no effect without on_nonfinite: skip")
        self._check_trackers()

    def _check_best(self) -> None:
        wanted = self.metric_for_best_model or self.load_best_model_at_end
        if not wanted:
            return
        if not self.save_steps or not self.eval_steps:
            raise UserError("training: tracking the best model needs save_steps and eval_steps")
        if self.save_steps % self.eval_steps:
            raise UserError(
                f"training.save_steps: {self.save_steps} is no multiple of eval_steps {self.eval_steps}; "
                "the best checkpoint could not be told"
            )

    def _check_early_stopping(self) -> None:
        if self.early_stopping_threshold < 0:
            raise UserError(f"training.early_stopping_threshold: not negative; got {self.early_stopping_threshold}")
        if self.early_stopping_patience is None:
            if self.early_stopping_threshold:
                raise UserError("training.early_stopping_threshold: has no effect without early_stopping_patience")
        elif not self.eval_steps:
            raise UserError("training.early_stopping_patience: counts evaluations, so it needs eval_steps")

    def _check_trackers(self) -> None:
        known = get_args(TrackerName)
        if isinstance(self.report_to, str) or not set(self.report_to) <= set(known):
            raise UserError(f"training.report_to: a list of {', '.join(known)}; got {self.report_to!r}")
        if len(set(self.report_to)) < len(self.report_to):
            raise UserError(f"training.report_to: each tracker once; got {', '.join(self.report_to)}")
        if "tensorboard" in self.report_to and not self.output_dir:
            raise UserError("training.report_to: tensorboard writes into the run folder; set training.output_dir")


@dataclass
class LoadConfig:
    """How the model will be loaded; strategies change it in `configure`.

    Attributes:
        model: what the user asked for.
        dtype: dtype of the weights as loaded (`auto`: the checkpoint's).
        trainable_dtype: 16-bit trainable weights are raised to it; null leaves them alone.
        attn_implementation: attention kernel by transformers' name; null lets transformers choose.
        device: where the weights are loaded.
        from_pretrained: further keyword arguments of `from_pretrained`.
        on_host: the weights are loaded on the host, and strategies take them to the card.
        one_by_one: weights are read one at a time, and not from mapped files, where that can be; where not, this is
            told why. Null: transformers reads them in its own way.
    """

    model: ModelConfig | None
    dtype: str = "auto"
    trainable_dtype: str | None = "float32"
    attn_implementation: str | None = None
    device: Any = "cpu"
    from_pretrained: dict[str, Any] = field(default_factory=dict)
    on_host: bool = False
    one_by_one: Callable[[str], None] | None = None

    @classmethod
    def of(cls, model: ModelConfig | None, device: Any) -> LoadConfig:
        """What the recipe asks for, before any strategy has its say."""
        if model is None:
            return cls(None, device=device)
        return cls(model, model.dtype, attn_implementation=model.attn_implementation, device=device)


def _positive(name: str, value: float) -> None:
    if value <= 0:
        raise UserError(f"training.{name}: must be above 0; got {value}")
