"""The fingerprint of a shard's KV: equal for two shards only if each can read the blocks of the other. Torch-free."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from shards.kv.keys import BLOCK_TOKENS

FORMAT = 1
"""The version of the raw form of a block; a change of `shards.kv.raw_block` makes a new one."""

Layout = tuple[tuple[str, tuple[int, ...]], ...]
"""The type and the shape of each tensor that one block consists of."""


@dataclass(frozen=True, slots=True)
class KvFacts:
    """Everything that the bytes of a block depend on, beside its tokens.

    `model` is the served name, which block keys depend on. `weights` is the digest of the files that they
    come from. `dtype` is their type. `numerics` has the further settings on which the last bits depend; empty if equal
    bits are not promised. `tensor_parallel`: this part of the model, and the number of parts.
    """

    model: str
    weights: str
    dtype: str
    layout: Layout
    numerics: str = ""
    tensor_parallel: tuple[int, int] = (0, 1)

    def fingerprint(self) -> bytes:
        """The SHA-256 of the facts, the block's size and the version of its raw form: 32 bytes."""
        facts = {**asdict(self), "block_tokens": BLOCK_TOKENS, "format": FORMAT}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
