"""Numbers of 4 or 8 bits in int32 words, from the low bits on."""

from __future__ import annotations

import torch
from torch import Tensor

from shards.network.errors import BrokenCheckpoint
from shards.quant.matrix import unpack_four_bits


def unpacked_words(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows, numbers] from int32 [rows, words]."""
    stored = words.contiguous().view(torch.uint8)
    return unpack_four_bits(stored) if bits == 4 else stored


def zeros_or_none(zeros: Tensor, usual: int) -> Tensor | None:
    """int16 zeros; None if all are the usual one."""
    return None if bool((zeros == usual).all()) else zeros.contiguous()


def require_whole_words(name: str, numbers: int, per_word: int) -> None:
    """Raise BrokenCheckpoint unless `numbers` numbers of matrix `name` fill words."""
    if numbers % per_word:
        raise BrokenCheckpoint(f"matrix {name} has {numbers} numbers in a line, which do not fill words of {per_word}")
