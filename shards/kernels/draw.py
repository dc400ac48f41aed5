"""How a token is drawn from each row of logits: the parameters that the kernels of a draw share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shards.kernels.adjust import NOT_ADJUSTED, Adjustments
from shards.kernels.launch import require, require_shape


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of the draw of each row, [rows] each: temperature, top_p and min_p float32; top_k and top_logprobs
    int32; seed and position int64.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and top_logprobs -1 are off. `truncated`: any row may have one of
    the first three on.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    top_logprobs: torch.Tensor
    adjustments: Adjustments | None = None
    truncated: bool = True

    @property
    def adjusting(self) -> tuple[torch.Tensor | int | None, ...]:
        """The arguments of kernels that adjust."""
        return NOT_ADJUSTED if self.adjustments is None else self.adjustments.arguments

    def require(self, logits: torch.Tensor) -> None:
        """Raise ValueError unless `logits` are rows, and all shapes fit them."""
        require(
            logits.dim() == 2 and logits.stride(1) == 1, f"logits are {list(logits.shape)}, not rows [rows, vocabulary]"
        )
        for field in ("temperature", "top_k", "top_p", "min_p", "seed", "position", "top_logprobs"):
            require_shape(field, getattr(self, field), (logits.shape[0],))
        if self.adjustments is not None:
            self.adjustments.require(*logits.shape)
