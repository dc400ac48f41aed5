"""The keys to look up a prompt, and the values that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from policies.prefix.match import Match
from policies.prefix.parity import Watched
from shards.kv.keys import BLOCK_TOKENS, block_keys

NO_DOMAIN = ""
"""The cache domain of blocks from an engine that does not report salts."""


class ChunkKeys(NamedTuple):
    """The document at tokens `start` up to `stop` of a prompt, with the keys of its chunk's blocks.

    A backend with the chunk need not compute the share `reused` of its tokens.
    """

    keys: tuple[int, ...]
    start: int
    stop: int
    reused: float


@dataclass(slots=True)
class Expected:
    """The expected values for a prompt's answer.

    Once the prompt is computed, its block `last_key` must have been stored; None: the prompt is shorter than a block of
    the engine. When it was sent, the engine had its first `event_tokens` by its events, and certainly its first
    `held_tokens`, up to the block `held_key`.
    """

    last_key: int | None = None
    last: Watched | None = None
    was_there: bool = False
    event_tokens: int = 0
    held_key: int | None = None
    held: Watched | None = None
    held_tokens: int = 0


class PromptKeys(msgspec.Struct):
    """The block keys of one prompt for `model`, as its backends call it.

    `is_exact`: they are keys of token ids, as those of events are; otherwise of text, and no event can match them.
    `token_ids` are little-endian uint32, empty if they are not known here. `compares`: its answer can be compared
    with the router's computation; not if the engine is asked to truncate the prompt. Each key stands for `key_tokens`
    of the prompt; for text that is an estimate. `shared_root` is the root key of
    prompts without a cache domain. `reported` are the matches from events
    when it was last looked up, and `expected` the values to compare the answers of backends with while it runs there.
    `chunks` are those of its documents which may be reused.
    """

    keys: tuple[int, ...]
    model: str = ""
    is_exact: bool = True
    token_ids: bytes = b""
    shared_root: int = 0
    compares: bool = True
    key_tokens: float = BLOCK_TOKENS
    reported: Mapping[str, Match] = msgspec.field(default_factory=dict)
    expected: dict[str, Expected] = msgspec.field(default_factory=dict)
    chunks: tuple[ChunkKeys, ...] = ()
    _shared: tuple[int, ...] | None = None

    @property
    def shared(self) -> tuple[int, ...]:
        """The keys of the same tokens without a cache domain, for engines that do not report salts."""
        if self._shared is None:
            self._shared = block_keys(self.token_ids, self.shared_root)
        return self._shared
