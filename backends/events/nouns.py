"""An engine's reports about its KV cache in nouns that all engines share. Each engine's decoder makes these.

Hashes are the engine's own and opaque: seed and algorithm differ from engine to engine and from start to start. An
index derives its own block keys from the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

BlockHash = int | str | bytes
"""An engine's name for a block and all that came before it."""

_TIERS = {"gpu": "device", "cpu": "host", "cpu_pinned": "host"}
_TOKEN_BYTES = 4
_MOST_BLOCK_TOKENS = 1 << 20


class MalformedEvents(ValueError):
    """Bytes that are not cache events of this engine; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The engine now holds `hashes` in `tier`: consecutive blocks, of which the first continues `parent`.

    `token_ids` are little-endian uint32, `block_tokens` to a block. Empty: the blocks were reported before, and now lie
    in this tier too. `salt` isolates prompts of the same tokens; engines report it with the first block of a prompt
    (`parent` None) or with every one. `extra_keys` has for each block what else its hash depends on, such as an image;
    such a block is not named by its tokens alone. `window` is how many positions back the attention of cache `group`
    sees; None is all of them.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: bytes
    block_tokens: int
    tier: str = "device"
    adapter: str | None = None
    salt: str | None = None
    extra_keys: tuple[tuple[str, ...], ...] = ()
    group: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.hashes:
            raise MalformedEvents("blocks were stored without hashes")
        if self.token_ids and len(self.token_ids) != len(self.hashes) * self.block_tokens * _TOKEN_BYTES:
            tokens = len(self.token_ids) // _TOKEN_BYTES
            raise MalformedEvents(f"{len(self.hashes)} blocks of {self.block_tokens} have {tokens} tokens")
        if self.token_ids and not 0 < self.block_tokens <= _MOST_BLOCK_TOKENS:
            raise MalformedEvents(f"a block has {self.block_tokens} tokens")
        if self.extra_keys and len(self.extra_keys) != len(self.hashes):
            raise MalformedEvents(f"{len(self.hashes)} blocks have {len(self.extra_keys)} extra keys")


@dataclass(frozen=True, slots=True)
class Removed:
    """The engine no longer holds `hashes` in `tier`; None: in any tier."""

    hashes: tuple[BlockHash, ...]
    tier: str | None = "device"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is known of the engine's blocks. `is_empty`: it holds none, by its own report or because it restarted.

    Two of them are equal anyway: the known blocks are gone either way.
    """

    is_empty: bool = field(default=False, compare=False)


CacheEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that an engine sent together, in order.

    `sent_at` is in seconds of the engine's clock; None where it sends no time. `rank` is the data-parallel rank that it
    names. `unknown` events had a tag that is not known here; `malformed` ones could not be read.
    """

    events: tuple[CacheEvent, ...]
    sent_at: float | None = None
    rank: int | None = None
    unknown: int = 0
    malformed: int = 0


@dataclass(slots=True)
class Gathered:
    """Collects the events of one batch, and counts unreadable ones."""

    events: list[CacheEvent] = field(default_factory=list)
    unknown: int = 0
    malformed: int = 0

    def skip(self, *, may_have_removed: bool) -> None:
        """Record an event that cannot be read. If it reported a removal, the present blocks are unknown."""
        self.malformed += 1
        # what is cleared twice in a row is cleared once
        if may_have_removed and not (self.events and isinstance(self.events[-1], Cleared)):
            self.events.append(Cleared())

    def batch(self, sent_at: float | None = None, rank: int | None = None) -> Batch:
        """All of it."""
        return Batch(tuple(self.events), sent_at, rank, self.unknown, self.malformed)


def tier_of(medium: str | None) -> str:
    """The tier of an engine's storage medium: none or "GPU" is device, "CPU" and "CPU_PINNED" are host."""
    return _TIERS.get(medium.lower(), medium.lower()) if medium else "device"


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises MalformedEvents if one does not fit."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise MalformedEvents(f"a token id is not a uint32: {error}") from error
