"""The layout of one step's metadata in one buffer, so that one copy brings all of it to the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.int32]

_ALIGNED_WORDS = 4
"""Fields begin at multiples of 16 bytes: Triton compiles a kernel again for pointers without this alignment."""

_KINDS: dict[str, tuple[np.dtype[Any], torch.dtype]] = {
    "int32": (np.dtype(np.int32), torch.int32),
    "int64": (np.dtype(np.int64), torch.int64),
    "float32": (np.dtype(np.float32), torch.float32),
}

FieldShape = tuple[str, str, tuple[int, ...]]
"""A field's name, its kind (int32, int64 or float32) and its shape."""


@dataclass(frozen=True, slots=True)
class Field:
    """The place of a field: `words` int32 words from `start` on, read as `kind` in this `shape`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    words: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Fields one after the other in a buffer of `words` int32 words."""

    fields: tuple[Field, ...]
    words: int

    @classmethod
    def of(cls, shapes: Sequence[FieldShape]) -> Layout:
        """A layout of these fields in this order: equal leading fields have equal places, whatever follows."""
        fields: list[Field] = []
        end = 0
        for name, kind, shape in shapes:
            words = math.prod(shape) * _KINDS[kind][0].itemsize // 4
            fields.append(Field(name, kind, shape, end, words))
            end += -(-words // _ALIGNED_WORDS) * _ALIGNED_WORDS
        return cls(tuple(fields), end)

    def arrays(self, buffer: Words) -> dict[str, npt.NDArray[Any]]:
        """Each field of a buffer on the host, as a writable view."""
        return {
            field.name: buffer[field.start : field.start + field.words].view(_KINDS[field.kind][0]).reshape(field.shape)
            for field in self.fields
        }

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each field of a buffer on the device, as a view."""
        return {
            field.name: buffer[field.start : field.start + field.words].view(_KINDS[field.kind][1]).view(field.shape)
            for field in self.fields
        }

    def check(self) -> None:
        """Assert that fields do not overlap, are aligned and fit."""
        end = 0
        for field in self.fields:
            assert field.start >= end, f"{field.name} overlaps the field before it"
            assert field.start % _ALIGNED_WORDS == 0, f"{field.name} is not aligned"
            end = field.start + field.words
        assert end <= self.words, "the last field exceeds the buffer"


def drawing_fields(rows: int) -> list[FieldShape]:
    """Parameters of the draws for `rows` rows of logits, and the rows of the token pool that store the tokens.

    `adjusted` and `penalties` as in `shards.kernels.adjust`.
    """
    return [
        ("seed", "int64", (rows,)),
        ("drawn_at", "int64", (rows,)),
        ("target", "int64", (rows,)),
        ("temperature", "float32", (rows,)),
        ("top_p", "float32", (rows,)),
        ("min_p", "float32", (rows,)),
        ("top_k", "int32", (rows,)),
        ("top_logprobs", "int32", (rows,)),
        ("adjusted", "int32", (rows, 3)),
        ("penalties", "float32", (rows, 3)),
    ]


def token_fields(tokens: int) -> list[FieldShape]:
    """The value and the place of each of `tokens` tokens. `source` is an index into the token pool followed by `known`:
    tokens that only the GPU knows are in the pool, tokens that the host knows are in `known`.
    """
    return [(name, "int32", (tokens,)) for name in ("source", "known", "position", "slot")]


def sharing_fields(rows: int) -> list[FieldShape]:
    """The splits that `rows` decoding rows have in common (`shards.gpu.sharing`)."""
    return [("spans", "int32", (rows, 4)), ("readers", "int32", (rows,)), ("own", "int32", (rows,))]


def decode_fields(rows: int, pages: int, mapped: int = 0, adapted: Sequence[FieldShape] = ()) -> list[FieldShape]:
    """All fields of a step that only decodes. Tables come last, because their width changes from step to step.

    `page_of` is the page of each of `mapped` blocks, in layers with a window that have pages of their own. `adapted`
    are those of rows with adapters.
    """
    return [
        *drawing_fields(rows),
        *token_fields(rows),
        ("context", "int32", (rows,)),
        *sharing_fields(rows),
        ("page_of", "int32", (mapped,)),
        *adapted,
        ("tables", "int32", (rows, pages)),
    ]


@lru_cache(maxsize=1024)
def decode_layout(rows: int, pages: int, mapped: int = 0, adapted: tuple[FieldShape, ...] = ()) -> Layout:
    """The layout of `decode_fields`, cached: making it would take as long as filling it."""
    return Layout.of(decode_fields(rows, pages, mapped, adapted))


class Size(NamedTuple):
    """The room of a step with chunks: `tokens` tokens of `rows` sequences, of which the first `decoding` may have one
    new token behind others. `drawn` tokens are drawn, and the chunks are cut into `tiles` tiles, of which the first
    `cut` may be parts of tiles.
    """

    tokens: int
    rows: int
    decoding: int
    drawn: int
    tiles: int
    cut: int = 0

    def holds(self, *, tokens: int, rows: int, drawn: int, tiles: int, tile_tokens: int) -> bool:
        """Whether such a step fits beside one row of padding, which needs tiles for the tokens that are left."""
        left = self.tokens - tokens
        has_tiles = tiles + -(-left // tile_tokens) <= self.tiles
        return left >= 0 and rows < self.rows and drawn <= self.drawn and has_tiles


def mixed_fields(size: Size, pages: int, mapped: int = 0, adapted: Sequence[FieldShape] = ()) -> list[FieldShape]:
    """All fields of such a step. `seen` are the contexts of all sequences, `context` those of decoding ones, else 0."""
    rows = size.rows
    return [
        *drawing_fields(size.drawn),
        *token_fields(size.tokens),
        ("wanted", "int32", (size.drawn,)),
        ("context", "int32", (rows,)),
        *sharing_fields(size.decoding),
        ("seen", "int32", (rows,)),
        ("first_queries", "int32", (rows + 1,)),
        ("tiles", "int32", (size.tiles, 4)),
        ("page_of", "int32", (mapped,)),
        *adapted,
        ("tables", "int32", (rows, pages)),
    ]


@lru_cache(maxsize=1024)
def mixed_layout(size: Size, pages: int, mapped: int = 0, adapted: tuple[FieldShape, ...] = ()) -> Layout:
    """The layout of `mixed_fields`, cached like that of `decode_fields`."""
    return Layout.of(mixed_fields(size, pages, mapped, adapted))


MIXED_TOKENS = 64
"""Steps with chunks are padded to multiples of so many tokens, which is what matrix products round up to anyway."""

FEW_ROWS = 96
"""Sequences of the smaller steps with chunks: kernels that decode and draw take time for rows of padding too."""

CHUNKS = 16
"""At least as many chunks fit into each padded step, besides the tiles that its tokens fill."""


def mixed_sizes(tokens: int, rows: int, *, tile_tokens: int, cut: int = 0) -> tuple[Size, ...]:
    """The sizes for which graphs are made, smallest first: up to `tokens` tokens of few or of up to `rows` sequences.
    One more sequence is padding: it has the tokens that a step does not need. `cut` is the most parts of tiles.
    """
    return tuple(
        Size(count, most + 1, most, most, count // tile_tokens + CHUNKS + cut, cut)
        for count in range(MIXED_TOKENS, tokens + 1, MIXED_TOKENS)
        for most in sorted({min(FEW_ROWS, rows, count), min(rows, count)})
    )


def decode_buckets(most: int) -> tuple[int, ...]:
    """The batch sizes for which graphs are made: 1, 2, 4, every multiple of 8 up to 256, and of 64 up to `most`."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, most + 64, 64))
    return tuple(size for size in sizes if size <= most)


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest of `buckets`, which are sorted, with room for `rows`; None if there is none."""
    return next((bucket for bucket in buckets if bucket >= rows), None)
