"""A shard's description of itself, and its reasons for rejecting a request."""

from __future__ import annotations

from dataclasses import dataclass

from shards.nouns import CacheEvent, Cause
from shards.wire.v1 import shard_pb2 as wire


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """A shard's description of itself for a router that attaches."""

    shard: str
    model: str
    block_tokens: int
    context_tokens: int
    vocabulary: int
    window_tokens: int
    max_requests: int
    version: str = ""
    device: str = ""
    dtype: str = ""
    shapes_answers: bool = False
    heartbeat_s: float = 0.0
    kv_address: str = ""
    kv_group: bytes = b""

    def welcome(self, snapshot: tuple[CacheEvent, ...]) -> wire.Welcome:
        """These facts for the wire; `snapshot` is the cache that will follow."""
        return wire.Welcome(
            shard=self.shard,
            model=self.model,
            block_tokens=self.block_tokens,
            context_tokens=self.context_tokens,
            vocabulary=self.vocabulary,
            window_tokens=self.window_tokens,
            max_requests=self.max_requests,
            version=self.version,
            device=self.device,
            dtype=self.dtype,
            snapshot_follows=bool(snapshot),
            keeps_cache=True,
            shapes_answers=self.shapes_answers,
            heartbeat_ms=round(self.heartbeat_s * 1000),
            continues_answers=True,
            kv_address=self.kv_address,
            kv_group=self.kv_group,
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why the server, not the engine, rejects a request."""

    cause: Cause
    message: str
