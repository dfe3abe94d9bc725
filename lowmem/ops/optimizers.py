"""One optimizer per parameter, seen from outside as a single one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


class PerParameter(Optimizer):
    """Holds an inner optimizer for every parameter; its groups and state are the live ones.

    Args:
        inner: parameter -> its optimizer, and the parameter that optimizer knows (the same, or a stand-in for it).
        step: what `step()` does.
    """

    def __init__(self, inner: dict[nn.Parameter, tuple[Optimizer, nn.Parameter]], step: Callable[[], None]) -> None:
        super().__init__(list(inner), {})
        # The schedule writes into these very dicts, so the rate reaches the inner optimizers.
        self.param_groups = [group for optimizer, _ in inner.values() for group in optimizer.param_groups]
        self.state = _State(inner)  # type: ignore[assignment]
        self._do_step = step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do what the strategy decided; closures are not supported."""
        assert closure is None
        self._do_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters themselves."""
        assert set_to_none
        for parameter in self.state:
            parameter.grad = None


class _State(MutableMapping[nn.Parameter, Any]):
    """Parameter -> state, wherever the inner optimizer keeps it."""

    def __init__(self, inner: dict[nn.Parameter, tuple[Optimizer, nn.Parameter]]) -> None:
        self.inner = inner

    def __getitem__(self, parameter: nn.Parameter) -> Any:
        optimizer, known = self.inner[parameter]
        return optimizer.state[known]

    def __setitem__(self, parameter: nn.Parameter, value: Any) -> None:
        optimizer, known = self.inner[parameter]
        optimizer.state[known] = value

    def __delitem__(self, parameter: nn.Parameter) -> None:
        optimizer, known = self.inner[parameter]
        del optimizer.state[known]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.inner
