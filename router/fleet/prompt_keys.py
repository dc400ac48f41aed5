"""What a prompt is looked up by: the keys of its blocks, and what these keys are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.prefix.match import Match
from shards.kv.keys import BLOCK_TOKENS, block_keys

if TYPE_CHECKING:
    from router.fleet.parity import Expected

NO_DOMAIN = ""
"""The cache domain of blocks whose salt an engine does not tell."""


@dataclass(slots=True)
class PromptKeys:
    """The block keys of one prompt for `model`, as its backends call it.

    `is_exact`: they are keys of token ids, as those of events are; otherwise of text, and no event can match them.
    `token_ids` are little-endian uint32, empty where they are not known here. `compares`: its answer can be compared
    with what the router computed; not where the engine is asked to cut the prompt. Each key stands for `key_tokens` of
    the prompt: text has as many as its length is estimated to be. `shared_root` is the root key of
    prompts that belong to no cache domain. `told` is what events said of it
    when it was last looked up, and `expected` what the answer is to be compared with while one is under way.
    """

    keys: tuple[int, ...]
    model: str = ""
    is_exact: bool = True
    token_ids: bytes = b""
    shared_root: int = 0
    compares: bool = True
    key_tokens: float = BLOCK_TOKENS
    told: Mapping[str, Match] = field(default_factory=dict)
    expected: Expected | None = None
    _shared: tuple[int, ...] | None = None

    @property
    def shared(self) -> tuple[int, ...]:
        """The keys of the same tokens in no cache domain, as engines name them whose events tell no salt."""
        if self._shared is None:
            self._shared = block_keys(self.token_ids, self.shared_root)
        return self._shared
