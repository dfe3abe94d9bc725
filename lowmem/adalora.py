"""AdaLoRA's own part in a training loop: a penalty on the loss, and ranks that are given out after every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AdaLoRALoop:
    """What peft's `AdaLoraModel` wants of a loop (Zhang et al. 2023, arXiv:2303.10512).

    The saved adapter keeps all its ranks: those that were taken away have a singular value of zero, which is the same
    function, and every file has one shape.

    Args:
        model: peft's model.
    """

    def __init__(self, model: nn.Module) -> None:
        tuner: Any = model.base_model
        self.tuner = tuner
        self.config: Any = self.tuner.peft_config[self.tuner.trainable_adapter_name]
        self.allocator: Any = self.tuner.rankallocator
        self.pattern: dict[str, list[bool]] | None = None
        for name, parameter in model.named_parameters():
            if ".ranknum." in name:  # a number, which peft's move to another device makes trainable
                parameter.requires_grad_(False)

    def penalty(self) -> Tensor:
        """The mean over all factors of how far each is from orthogonal, times `orth_reg_weight`."""
        factors = [
            p @ p.T if ".lora_A." in name else p.T @ p
            for name, p in self.tuner.model.named_parameters()
            if ".lora_A." in name or ".lora_B." in name
        ]
        distances = [
            torch.linalg.matrix_norm(f - torch.eye(len(f), dtype=f.dtype, device=f.device))  # Frobenius
            for f in factors
        ]
        return self.config.orth_reg_weight * torch.stack(distances).sum() / len(factors)  # type: ignore[no-any-return]

    def allocate(self, step: int) -> None:
        """After a step (counted from 0), before the gradients go: take the least important ranks away."""
        if self.allocator.peft_config is not self.config:
            raise AssertionError("peft's allocator has another configuration")
        last = self.config.total_step - self.config.tfinal
        if next(self.tuner.parameters()).is_meta:
            if step < last:
                self.allocator.update_ipt(self.tuner.model)
            return
        if step > last and self.pattern is None:  # the step that was to end it was skipped
            step = last
        self.config.rank_pattern = self.pattern
        self.tuner.update_and_allocate(step)
        self.pattern, self.config.rank_pattern = self.config.rank_pattern, None

    def state_dict(self) -> dict[str, Any]:
        """The ranks that are left, and the averages that judge them."""
        a = self.allocator
        return {"pattern": self.pattern, "ipt": a.ipt, "exp_avg_ipt": a.exp_avg_ipt, "exp_avg_unc": a.exp_avg_unc}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        device = next(self.tuner.parameters()).device
        self.pattern = state["pattern"]
        for name in ("ipt", "exp_avg_ipt", "exp_avg_unc"):
            setattr(self.allocator, name, {key: t.to(device, copy=True) for key, t in state[name].items()})
