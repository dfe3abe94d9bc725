"""A plan as a commented recipe, which `lowmem train` runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowmem.durable import write_text
from lowmem.memory.choose import MARGIN, Plan, Search
from lowmem.memory.estimate import GIB
from lowmem.memory.search import Choice, Option
from lowmem.recipe import load_recipe
from lowmem.strategies import STRATEGIES
from lowmem.yaml_lines import dump_yaml

_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}  # adapters take about ten times the rate of full fine-tuning


def write_recipe(plan: Plan, path: Path, train: str = "train.jsonl") -> None:
    """Write the recipe of a plan.

    Args:
        plan: as found.
        path: the file; what lies there is replaced.
        train: the rows (`data.train`), relative to the recipe's folder.

    Raises:
        UserError: the file cannot be written.
    """
    write_text(path, recipe_text(plan, path.name, train))
    load_recipe(path, check_files=False)  # what is written is what was planned, or this fails here and now


def recipe_text(plan: Plan, name: str, train: str = "train.jsonl") -> str:
    """The recipe of a plan, with what it is predicted to need and what each strategy is worth."""
    parts = [_head(plan, name), _model(plan), _data(train), _training(plan), _strategies(plan)]
    return "\n".join(parts)


def _head(plan: Plan, name: str) -> str:
    found, numbers = plan.estimate, plan.training
    lines = [
        f"{name}: {plan.method} fine-tuning of {plan.problem.model.name_or_path}, as planned by lowmem.",
        "",
        f"Predicted for rows of {numbers.max_length:,} tokens, the time for {plan.problem.card.name}:",
        f"  {plan.needed_bytes / GIB:.2f} GiB of the card: {found.peak_reserved_bytes / GIB:.2f} reserved, "
        f"{MARGIN:.0%} margin, {found.context_bytes / GIB:.2f} for CUDA itself",
        f"  {found.host_bytes / GIB:.2f} GiB of the host's memory (in {found.host_phase})",
        f"  {plan.seconds:.3g} s per optimizer step, {plan.tokens_per_second:,.0f} tokens/s",
        f"At the peak ({found.phase}{', ' + found.place if found.place else ''}), in GiB:",
        *(f"  {size / GIB:7.3f}  {category}" for category, size in found.ledger.items() if size >= GIB / 1000),
        *(["Given up: " + "; ".join(plan.choice.gives_up) + "."] if plan.choice.gives_up else []),
    ]
    return "".join(f"# {_printable(line)}".rstrip() + "\n" for line in lines)


def _model(plan: Plan) -> str:
    model = plan.problem.model_of(plan.choice)
    block: dict[str, Any] = {"name_or_path": model.name_or_path, "dtype": model.dtype}
    block |= {
        key: getattr(model, key)
        for key in ("revision", "attn_implementation", "add_tokens", "chat_template")
        if getattr(model, key) is not None
    }
    block |= {"trust_remote_code": True} if model.trust_remote_code else {}
    return dump_yaml({"model": block})


def _data(train: str) -> str:
    return dump_yaml({"data": {"train": train}}).rstrip() + "  # your rows; relative to this file\n"


def _training(plan: Plan) -> str:
    numbers = plan.training
    notes = {
        "batch_size": "rows per optimizer step, however they are split",
        "max_length": "longer rows are cut; memory is planned for batches of rows as long as this",
        "max_grad_norm": "null: the norm of all gradients is not to be had with the update in backward"
        if numbers.max_grad_norm is None and plan.problem.training.max_grad_norm is not None
        else "",
    }
    values = {
        "batch_size": numbers.batch_size,
        "max_length": numbers.max_length,
        "learning_rate": _RATES[plan.method],
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
        "max_grad_norm": numbers.max_grad_norm,
        "num_train_epochs": 1,
        "output_dir": f"out/{plan.method}",
    }
    lines = dump_yaml({"training": values}).splitlines()
    return "".join(_noted(line, notes.get(line.strip().partition(":")[0], "")) for line in lines)


def _strategies(plan: Plan) -> str:
    settings = plan.choice.settings()
    if not settings:
        return "strategies: {}\n"
    worth = _worth(plan)
    text = ""
    for key, values in settings.items():
        lines = dump_yaml({key: values}).splitlines()
        text += f"  # {worth.get(key) or 'saves ' + STRATEGIES[key].saves}\n"
        text += "".join(f"  {line}\n" for line in lines)
    return "strategies:\n" + text


def _worth(plan: Plan) -> dict[str, str]:
    """What each strategy saves and costs, from the same step without it, where it can be left out."""
    costs = Search(plan.problem).costs
    found: dict[str, str] = {}
    here = costs.exact(plan.choice)
    for axis in plan.problem.axes:
        pick = plan.choice.picks[axis.name]
        plain = next((option for option in axis.options if not option.strategies), None)
        if not pick.strategies or plain is None:
            continue
        without = _without(plan.choice, axis.name, plain, costs.choices)
        if without is not None:
            there = costs.exact(without)
            saved, slower = there.allocated - here.allocated, here.seconds - there.seconds
            words = f"{_signed(saved / GIB, 'saves', 'takes')} GiB, {_signed(slower, 'costs', 'saves')} s a step"
            found |= dict.fromkeys(pick.strategies, f"against {plain.name}: {words}")
    return found


def _without(choice: Choice, axis: str, plain: Option, allowed: list[Choice]) -> Choice | None:
    other = choice.with_(**{axis: plain})
    return other if any(other.key == one.key for one in allowed) else None


def _signed(value: float, positive: str, negative: str) -> str:
    return f"{positive if value >= 0 else negative} {abs(value):.3g}"


def _printable(text: str) -> str:
    """A folder's name may have a line break in it, which would end the comment."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _noted(line: str, note: str) -> str:
    return f"{line}  # {note}\n" if note else f"{line}\n"
