"""Where every value of a recipe came from: a line of the file, or an override."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowmem.yaml_lines import KeyPath, RecipeError, dotted


@dataclass
class Source:
    """The values of a recipe before they are checked, with their origins.

    Attributes:
        name: the file, for messages.
        tree: the parsed values; overrides change them.
        origins: path of keys -> `file:line`, or the override.
    """

    name: str
    tree: Any
    origins: dict[KeyPath, str]

    def error(self, path: KeyPath, reason: str) -> RecipeError:
        """An error at `path`, with its origin in front."""
        origin = self.origin(path)
        # classes that check themselves name the key already
        for start in range(min(2, len(path))):
            named = str(path[start])
            if reason.startswith((f"{named}.", f"{named}:")):
                return RecipeError(f"{origin}: {'.'.join([*map(str, path[:start]), reason])}")
        return RecipeError(f"{origin}: {dotted(path)}: {reason}")

    def origin(self, path: KeyPath) -> str:
        """That of the nearest enclosing key that has one."""
        return next((self.origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.origins), self.name)

    def is_override(self, path: KeyPath) -> bool:
        """The value comes from the command line, not from the file."""
        return self.origin(path).startswith("override ")
