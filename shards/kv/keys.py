"""Block keys: names for KV that router and shard both compute from token ids. Torch-free.

A key is the xxh3-64 of a block's token bytes, seeded with its parent's key; the first block's parent is the root of its
cache domain. Equal keys mean, almost surely, an equal prefix in the same model and domain. The router places by keys;
a shard compares the tokens themselves before it reuses memory, since xxh3 does not resist an adversary.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 64
"""Positions in one block of KV."""

TOKEN_BYTES = 4
"""Bytes of a token id: little-endian uint32, on the wire and in hashes."""

_CHUNKS = "\x00chunks"

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_BLOCK = struct.Struct(f"{_BLOCK_BYTES}s")


def root_key(model: str, domain: str, adapter: str = "") -> int:
    """The parent of every first block of `model` with `adapter` in cache `domain`."""
    return xxh3_64_intdigest("\x00".join((model, adapter, domain)).encode())


def block_keys(token_ids: bytes, parent: int) -> tuple[int, ...]:
    """The chained keys of all full blocks in `token_ids` (little-endian uint32), which continue `parent`."""
    digest, whole = xxh3_64_intdigest, len(token_ids) - len(token_ids) % _BLOCK_BYTES
    # cut and chained in C except for one call per block: 0.65 of the time of slices in a loop
    return tuple([parent := digest(block, parent) for (block,) in _BLOCK.iter_unpack(memoryview(token_ids)[:whole])])


def chunk_domain(domain: str) -> str:
    """The domain of the chunks of `domain`. No prompt is in it: requests in such a domain are refused."""
    return domain + _CHUNKS


def is_chunk_domain(domain: str) -> bool:
    """Whether `domain` is that of the chunks of another one."""
    return domain.endswith(_CHUNKS)
