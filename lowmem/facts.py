"""What `lowmem strategies` and `lowmem explain` say, taken from the declarations alone; no weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin

from lowmem.config import TrainingConfig
from lowmem.json_schema import plain
from lowmem.schema import field_types
from lowmem.strategy import PLAIN_RUN, Strategy, resolve

# part -> (the method that wraps it, what stands innermost)
_PARTS = {
    "load": ("configure", "model block"),
    "model": ("wrap_model", "pretrained model"),
    "loss": ("wrap_loss", "next-token cross-entropy, summed"),
    "optimizer": ("wrap_optimizer", None),  # the slot is always filled by a strategy
    "forward_backward": ("wrap_forward_backward", "forward+backward of each micro-batch"),
    "step": ("wrap_step", "optimizer+schedule"),
    "inference": ("wrap_inference", "eval mode, no gradients"),
}


def explain(strategies: Sequence[Strategy], training: TrainingConfig) -> dict[str, Any]:
    """The chain of every part, inner to outer, and the settings of every strategy that takes part.

    Returns:
        `chains`: part -> names, the innermost first; `strategies`: name -> stage, settings, and whether the trainer
        added it.

    Raises:
        ConflictError: the strategies do not work together.
    """
    from lowmem.strategies import with_defaults

    given = {strategy.name for strategy in strategies}
    ordered = resolve(with_defaults(strategies, training))
    chains = {}
    for part, (method, innermost) in _PARTS.items():
        wrapping = [item.name for item in ordered if _overrides(item, method)]
        chains[part] = [innermost, *wrapping] if innermost else wrapping
    described = {
        item.name: {
            "stage": item.stage.name.lower(),
            "settings": plain(item.settings()),
            "added_by_trainer": item.name not in given,
        }
        for item in ordered
    }
    return {"chains": chains, "strategies": described}


def strategy_facts() -> list[dict[str, Any]]:
    """One entry per strategy, inner to outer: name, class, stage, slot, exact, saves, costs, needs, refuses.

    `needs` maps what a plain run lacks to the strategies that provide it; `refuses` maps other strategies to the reason
    (where only a setting is refused, the reason names it).
    """
    from lowmem.strategies import STRATEGIES

    examples = {name: variants(cls) for name, cls in STRATEGIES.items()}
    entries = []
    for name, variant in sorted(examples.items(), key=lambda pair: (pair[1][""].stage, pair[0])):
        item = variant[""]
        others = {other: _conflict(variant, examples[other]) for other in examples if other != name}
        entries.append(
            {
                "name": name,
                "class": type(item).__name__,
                "stage": item.stage.name.lower(),
                "slot": item.slot,
                "exact": item.exact,
                "saves": item.saves,
                "costs": item.costs,
                # what it takes away itself, a partner must bring back
                "needs": {
                    trait.value: [other for other in examples if trait in examples[other][""].provides]
                    for trait in sorted(item.needs - (PLAIN_RUN - item.breaks))
                },
                "refuses": {other: reason for other, reason in others.items() if reason},
            }
        )
    return entries


def _overrides(strategy: Strategy, method: str) -> bool:
    return getattr(type(strategy), method) is not getattr(Strategy, method)


def variants(cls: type[Strategy]) -> dict[str, Strategy]:
    """Instances to read declarations off: the defaults under "", and one per other choice of a setting."""
    found = {"": cls()}
    for field, hint in field_types(cls).items():
        for choice in _choices(hint):
            if choice != getattr(found[""], field):
                with suppress(ValueError):  # not a choice beside these defaults
                    found[f"{field}={choice}"] = cls(**{field: choice})
    return found


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a field that can be listed."""
    if hint is bool:
        return (True, False)
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) if get_origin(part) is Literal for choice in get_args(part))


def _conflict(one: dict[str, Strategy], other: dict[str, Strategy]) -> str | None:
    """Why two strategies do not go together; a setting is named only where the defaults would do."""
    for setting, item in one.items():
        for other_setting, partner in other.items():
            reason = _clash(item, partner)
            if reason:
                where = " and ".join(filter(None, (setting, other_setting)))
                return f"{reason} (with {where})" if where else reason
    return None


def _clash(one: Strategy, other: Strategy) -> str | None:
    if one.slot and one.slot == other.slot:
        return f"both fill the slot '{one.slot}'"
    provided = one.provides | other.provides
    for needing, breaking in ((one, other), (other, one)):
        lost = sorted((needing.needs & breaking.breaks) - provided)
        if lost:
            return f"{needing.name} needs {lost[0].value}"
    return None
