"""The one error a user sees as a line without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right: the message says what is wrong, where, and what to do (exit code 2)."""


class ExplainedError(UserError):
    """One whose message has several lines, which the command line shows as they are."""
