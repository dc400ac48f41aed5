"""Changes logits before a draw: penalties, bias, stops that come too early, and the tokens that a grammar allows.

Nothing is written: each kernel that reads a row's logits changes them as it reads, so rows without changes cost one
number. Of each sequence with changes the device keeps one number per token, in a `slot` of its own.
"""

# In Triton the parameters of a kernel have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shards.kernels.launch import require, require_shape

IN_PROMPT = tl.constexpr(1)
"""Bit of an entry: the prompt has this token."""

ENDS = tl.constexpr(2)
"""Bit of an entry: this token ends the answer."""

BIAS_SHIFT = tl.constexpr(2)
MOST_BIASES = 1023
"""Most values of bias that differ, in one slot."""

COUNT_SHIFT = tl.constexpr(12)
ONE_MORE = tl.constexpr(1 << 12)
"""What an entry grows by when its token is drawn."""

MOST_COUNTED = tl.constexpr(2**19 - 1)
"""A token is counted up to this number in one answer."""

MAY_END = tl.constexpr(1)
"""Flag of a row: tokens that end the answer may be drawn."""

COUNTS = tl.constexpr(2)
"""Flag of a row: the drawn token is counted in its slot."""


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The changes of each row, and the state that they read.

    `rows` [rows, slot|mask|flags] int32: its slot, or -1; its row of `masks`, or -1; MAY_END and COUNTS. `penalties`
    [rows, repetition|presence|frequency] float32. `entries` [slots, vocabulary] int32: bit 0 if the prompt has the
    token, bit 1 if it ends the answer, from bit 2 on the place of its bias, from bit 12 on how often it was drawn.
    `biases` [slots, 1024] float32; place 0 is 0. `masks` [masks, words] int32: bit t % 32 of word t // 32 is 1 if
    token t is allowed.
    """

    rows: torch.Tensor
    penalties: torch.Tensor
    entries: torch.Tensor
    biases: torch.Tensor
    masks: torch.Tensor

    def require(self, rows: int, vocabulary: int) -> None:
        """Raise ValueError unless all shapes fit."""
        require_shape("rows", self.rows, (rows, 3))
        require_shape("penalties", self.penalties, (rows, 3))
        require(self.entries.shape[1] >= vocabulary, f"entries are for {self.entries.shape[1]} of {vocabulary} tokens")
        require_shape("biases", self.biases, (len(self.entries), MOST_BIASES + 1))
        require(32 * self.masks.shape[1] >= vocabulary, f"masks have {self.masks.shape[1]} words for {vocabulary} bits")

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """The arguments of kernels that adjust."""
        return (
            *(self.rows, self.penalties, self.entries, self.biases, self.masks),
            *(self.entries.stride(0), self.masks.stride(0)),
        )


NOT_ADJUSTED = (None,) * 7
"""The arguments of kernels that adjust, where no row is."""


def adjust_reference(logits: torch.Tensor, adjustments: Adjustments | None) -> torch.Tensor:
    """The changed logits [rows, vocabulary], float32. The reference for what kernels read.

    In order: repetition penalty over prompt and answer, as in transformers; presence and frequency penalty over the
    answer, as in OpenAI's API; bias; -inf for tokens that end the answer too early, and for those not allowed.
    """
    wide = logits.float()
    if adjustments is None:
        return wide
    out, vocabulary = wide.clone(), logits.shape[1]
    for row, (slot, mask, flags) in enumerate(adjustments.rows.tolist()):
        values = out[row]
        if slot >= 0:
            entry = adjustments.entries[slot, :vocabulary]
            repetition, presence, frequency = adjustments.penalties[row]
            count = entry >> COUNT_SHIFT.value
            has = (count > 0) | (entry & IN_PROMPT.value > 0)
            values = torch.where(has, torch.where(values < 0, values * repetition, values / repetition), values)
            values = values - (frequency.double() * count + presence * (count > 0)).float()
            values = values + adjustments.biases[slot][entry.long() >> BIAS_SHIFT.value & MOST_BIASES]
            if not flags & MAY_END.value:
                values = values.masked_fill(entry & ENDS.value > 0, -torch.inf)
        if mask >= 0:
            token = torch.arange(vocabulary, device=logits.device)
            allowed = adjustments.masks[mask][token // 32] >> token % 32 & 1
            values = values.masked_fill(allowed == 0, -torch.inf)
        out[row] = values
    return out


@triton.jit
def is_adjusted(rows, at_row):
    """Whether a row is changed."""
    return (tl.load(rows + at_row * 3) >= 0) | (tl.load(rows + at_row * 3 + 1) >= 0)


@triton.jit
def adjusted(wide, token, inside, at_row, rows, penalties, entries, biases, masks, entries_row, masks_row):
    """`wide`, the float32 logits of tokens `token` of row `at_row`, changed; every kernel gets the same bits."""
    if rows is not None:
        slot = tl.load(rows + at_row * 3).to(tl.int64)
        mask = tl.load(rows + at_row * 3 + 1).to(tl.int64)
        if slot >= 0:
            entry = tl.load(entries + slot * entries_row + token, mask=inside, other=0)
            repetition = tl.load(penalties + at_row * 3)
            presence = tl.load(penalties + at_row * 3 + 1)
            frequency = tl.load(penalties + at_row * 3 + 2)
            count = (entry >> COUNT_SHIFT).to(tl.float32)
            has = (count > 0) | ((entry & IN_PROMPT) > 0)
            # the rounding is fixed: a compiler that chose it anew in each kernel would move tokens over a threshold
            wide = tl.where(has, tl.where(wide < 0, wide * repetition, tl.div_rn(wide, repetition)), wide)
            wide = wide - tl.fma(frequency, count, tl.where(count > 0, presence, 0.0))
            place = (entry >> BIAS_SHIFT) & 1023
            wide = wide + tl.load(biases + slot * 1024 + place, mask=place > 0, other=0.0)
            may_end = tl.load(rows + at_row * 3 + 2) & MAY_END
            wide = tl.where(((entry & ENDS) > 0) & (may_end == 0), float("-inf"), wide)
        if mask >= 0:
            word = tl.load(masks + mask * masks_row + token // 32, mask=inside, other=0)
            wide = tl.where(((word >> (token % 32)) & 1) > 0, wide, float("-inf"))
    return wide
