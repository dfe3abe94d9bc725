"""What a strategy refuses for a model is no answer for the planner."""

from __future__ import annotations

from dataclasses import replace

from lowmem.errors import UserError
from lowmem.memory.guess import Problem
from lowmem.memory.search import Axis, Option, choices

_TOKENS = 16


def usable(given: Problem) -> Problem:
    """The problem, of whose answers those are left that the model's layers allow, for the methods for which they do.

    Only answers that may be refused for a model (`Option.may_be_refused`) are tried: a step of few tokens and layers.
    """
    axes = []
    for axis in given.axes:
        options = (_allowed(given, axis, option) if option.may_be_refused else option for option in axis.options)
        axes.append(replace(axis, options=tuple(option for option in options if option.methods)))
    return replace(given, axes=tuple(axes))


def _allowed(given: Problem, axis: Axis, option: Option) -> Option:
    """With the methods under which it is not refused."""
    having = [choice for choice in choices(given.axes, given.training) if choice.picks[axis.name] is option]
    found = []
    for method in option.methods:
        choice = next((choice for choice in having if choice.method == method), None)
        if choice is None:
            continue
        subject = given.subject(choice)
        try:
            subject.trace((_TOKENS,) * given.training.batch_size, layers=subject.shallow)
        except UserError:
            continue
        found.append(method)
    return replace(option, methods=tuple(found))
