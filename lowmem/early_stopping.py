"""Early stopping: a run ends when its evaluation loss no longer falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """Counts evaluations in a row whose loss is not lower than the lowest before it, as transformers does.

    Attributes:
        patience: how many of them end the run; null: it never ends so.
        threshold: by how much a loss must be lower to count.
        lowest: the lowest finite loss so far, and its step.
        waited: evaluations since the count began.
    """

    patience: int | None
    threshold: float
    lowest: tuple[float, int] | None = None
    waited: int = 0

    def after_evaluation(self, loss: float, step: int) -> str | None:
        """Take note of an evaluation; the reason to stop, once there is one."""
        lower = math.isfinite(loss) and (self.lowest is None or self.lowest[0] - loss > self.threshold)
        self.waited = 0 if lower else self.waited + 1
        if math.isfinite(loss) and (self.lowest is None or loss < self.lowest[0]):
            self.lowest = (loss, step)
        return self.reason()

    def reason(self) -> str | None:
        """Why the run ends here; null while it goes on."""
        if self.patience is None or self.waited < self.patience:
            return None
        lowest = f"the lowest is {self.lowest[0]:.6g} at step {self.lowest[1]}" if self.lowest else "none was finite"
        by = f" by more than {self.threshold:g}" if self.threshold else ""
        return f"early stopping: eval_loss has not fallen{by} in {self.waited} evaluations in a row ({lowest})"

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `trainer.json`."""
        return {"lowest": self.lowest, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from where `state_dict` was taken."""
        self.lowest = tuple(state["lowest"]) if state["lowest"] else None  # type: ignore[assignment]
        self.waited = state["waited"]
