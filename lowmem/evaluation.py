"""How good a model is on rows it was not trained on: loss, perplexity, token accuracy, exact match."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowmem.answers import answer_all, share
from lowmem.checks import require_positions
from lowmem.config import WeightedPath
from lowmem.data import TokenizedDataset, prompts_and_answers, tokenize
from lowmem.errors import UserError
from lowmem.loss import IGNORE, count, next_token_cross_entropy, num_targets, shifted_targets
from lowmem.model import call, final_softcap, head, head_weights, without_head
from lowmem.ops.scores import linear_scores, logit_scores
from lowmem.run import number
from lowmem.strategy import ForwardBackward, Sample

if TYPE_CHECKING:
    from lowmem.loaded import LoadedRun


def summed_loss(
    forward_backward: ForwardBackward,
    rows: TokenizedDataset,
    batch_size: int,
    before_batch: Callable[[], None] = lambda: None,
) -> tuple[float, float, int]:
    """Summed loss, loss weight and target tokens of all rows, `batch_size` rows at a time; gradients are off."""
    total, weight, targets = 0.0, 0.0, 0
    order = sorted(range(len(rows)), key=lambda row: int(rows.lengths[row]))  # like lengths pad little
    for i in range(0, len(order), batch_size):
        before_batch()
        batch = [rows[row] for row in order[i : i + batch_size]]
        total += number(forward_backward([batch], 1.0))
        weight += count(batch)
        targets += sum(map(num_targets, batch))
    return total, weight, targets


def evaluate(loaded: LoadedRun, data: Any = None, exact_match: Any = None) -> dict[str, Any]:
    """Measure a model on held-out rows.

    Rows are read as the recipe says (`format`, `train_on`, `on_bad_row`, `max_length`) and go through the strategies
    that shape a forward pass, `eval_batch_size` at a time; the logits of all tokens never exist. Whatever loss the
    model was trained by, the cross entropy of the next token is measured.

    Args:
        loaded: the model.
        data: rows for the loss (a path, a `Dataset`, a list); null: the recipe's `data.eval`, else the rows of
            `exact_match`, else those of the recipe's `data.exact_match`.
        exact_match: prompts with reference answers; null: the recipe's, unless `data` is given.

    Returns:
        `eval_loss` (nats per unit of loss weight), `perplexity` (its exponential), `token_accuracy` (share of the
        target tokens that have the largest logit), `eval_tokens` (targets), `eval_rows`, `eval_seconds`, `eval_data`;
        with prompts `exact_match` (share), `exact_match_rows` and `exact_match_data`.

    Raises:
        UserError: no rows to measure on, no tokenizer to read them with, or a loss that is not finite.
    """
    written = loaded.recipe.data
    asked = exact_match if exact_match is not None else written.exact_match if data is None else None
    source = next((rows for rows in (data, written.eval, asked) if rows is not None), None)
    if source is None:
        raise UserError("evaluate: the recipe has no data.eval and no data.exact_match; give a file with --data")
    start = time.perf_counter()
    result = {"eval_data": _shown(source), **_losses(loaded, source)}
    result["eval_seconds"] = time.perf_counter() - start
    if asked is not None:
        loaded.require_tokenizer()
        pairs = prompts_and_answers(asked, written)
        with loaded.inference() as model:
            answers = answer_all(model, loaded.tokenizer, pairs)
        result["exact_match"] = share(answers, pairs)
        result["exact_match_rows"] = len(pairs)
        result["exact_match_data"] = _shown(asked)
    return result


def _losses(loaded: LoadedRun, source: Any) -> dict[str, Any]:
    rows = tokenize(source, loaded.tokenizer, loaded.recipe.data, loaded.recipe.training.max_length)
    require_positions(loaded.model, rows, loaded.recipe.training.max_length)
    scores = Scores()
    forward_backward = scores.through(loaded)
    with loaded.inference():
        # Strategies, and the scores, look at their first rows more than once; that is not to be counted.
        forward_backward([[rows[0]]], 1.0)
        scores.hits, scores.targets = 0, 0
        total, weight, targets = summed_loss(forward_backward, rows, loaded.recipe.training.eval_batch_size)
    if scores.targets != targets:
        raise UserError(f"evaluate: of {targets} targets the strategies have evaluated {scores.targets}")
    if scores.plain_head is False:
        loaded.notices.append("the head is no plain linear layer, so the logits of one micro-batch exist at once")
    loss = total / weight
    if not math.isfinite(loss):
        raise UserError(f"evaluate: the loss is {loss}; the weights, or the precision, do not bear these rows")
    return {
        "eval_loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else None,
        "token_accuracy": float(scores.hits) / targets,
        "eval_tokens": targets,
        "eval_rows": len(rows),
    }


class Scores:
    """A loss that also counts the targets with the largest logit, a chunk of tokens at a time.

    Attributes:
        hits: targets with the largest logit so far.
        targets: targets so far.
        plain_head: whether head and loss are taken chunk by chunk; unknown before the first row.
    """

    def __init__(self) -> None:
        self.hits: int | Tensor = 0
        self.targets = 0
        self.plain_head: bool | None = None

    def through(self, loaded: LoadedRun) -> ForwardBackward:
        """The pass over micro-batches, as the strategies of a run shape it; its loss is this one.

        A strategy that computes the loss itself is left out: this loss is the same one, in chunks.
        """
        from lowmem.batches import to_device

        loss: Any = self
        strategies = [strategy for strategy in loaded.strategies if strategy.slot != "loss"]
        for strategy in strategies:
            loss = strategy.wrap_loss(loss, loaded.run)

        def forward(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            total = torch.zeros((), device=loaded.run.device)
            for inputs in to_device(micro_batches, loaded.run.device):
                total = total + loss(loaded.model, inputs) / divisor
            return total

        wrapped: ForwardBackward = forward
        for strategy in strategies:
            wrapped = strategy.wrap_forward_backward(wrapped, loaded.run)
        return wrapped

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Weighted sum of the cross entropy over all target tokens."""
        if self.plain_head is None:
            self.plain_head = _has_plain_head(model, inputs)
        loss, hits, targets = _score(model, inputs, self.plain_head)
        self.hits, self.targets = self.hits + hits, self.targets + targets
        return loss


def _score(model: nn.Module, inputs: dict[str, Tensor], plain_head: bool) -> tuple[Tensor, Tensor, int]:
    targets, weights = shifted_targets(inputs)
    rows = torch.nonzero(targets != IGNORE).squeeze(1)
    targets, weights = targets[rows], None if weights is None else weights[rows]
    if not plain_head:
        logits = call(model, inputs)[:, :-1].flatten(0, 1)[rows]  # (targets, vocabulary)
        logits = logits.float() if logits.element_size() < 4 else logits
        return *logit_scores(logits, targets, weights), len(rows)
    with without_head(model):
        hidden = call(model, inputs)[:, :-1].flatten(0, 1)[rows]  # (targets, width)
    return *linear_scores(hidden, *head_weights(model), targets, weights, final_softcap(model)), len(rows)


def _has_plain_head(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether a linear layer and a soft cap are all that makes the logits: a few tokens go both ways."""
    few = {"input_ids": inputs["input_ids"][:1, :8].clone(), "labels": inputs["input_ids"][:1, :8].clone()}
    try:
        head(model)
    except UserError:
        return False
    expected = float(next_token_cross_entropy(model, few))
    return abs(float(_score(model, few, True)[0]) - expected) <= 0.02 * abs(expected) + 1e-3


def _shown(source: Any) -> str:
    """A source in words."""
    if isinstance(source, str | Path):
        return str(source)
    if isinstance(source, WeightedPath):
        return source.path
    if isinstance(source, list) and source and isinstance(source[0], str | WeightedPath):
        return ", ".join(map(_shown, source))
    return f"{len(source):,} rows" if hasattr(source, "__len__") else type(source).__name__
