"""Caches that might have been: what a cache of a given size would hold of each prompt."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class HeldPrefix(NamedTuple):
    """Tokens of a prompt that a cache has, and those of them that were computed by then."""

    tokens: int = 0
    computed: int = 0


class LruPrefixes:
    """A cache of prefixes by their keys that evicts what was used longest ago, ends before beginnings.

    `tokens` is its size; infinite by default. Answers and the ends of prompts that have no key take room too.
    """

    def __init__(self, tokens: float = math.inf) -> None:
        self.size = tokens
        self.used = 0
        # key -> its tokens, and when they were computed; the next to be evicted comes first. Tokens without a key have
        # a negative number in place of it.
        self._entries: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._unnamed = 0

    def __repr__(self) -> str:
        return f"<LruPrefixes {self.used} of {self.size} tokens>"

    def held(self, keys: Sequence[int], key_tokens: int, *, at_s: float = math.inf) -> HeldPrefix:
        """How much of a prompt with these `keys` it has, and how much of that was computed at `at_s`."""
        entries = self._entries
        count = computed = 0
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                break
            if computed == count and entry[1] <= at_s:
                computed += 1
            count += 1
        return HeldPrefix(count * key_tokens, computed * key_tokens)

    def add(self, keys: Sequence[int], key_tokens: int, *, further: int = 0, computed_s: float = -math.inf) -> None:
        """A prompt with these `keys` is computed, until `computed_s` at the latest, with `further` tokens behind."""
        entries = self._entries
        if further > 0 and self.size < math.inf:
            self._unnamed -= 1
            entries[self._unnamed] = (further, computed_s)
            self.used += further
        for key in reversed(keys):
            before = entries.get(key)
            if before is None:
                entries[key] = (key_tokens, computed_s)
                self.used += key_tokens
            else:
                entries[key] = (before[0], min(before[1], computed_s))
                entries.move_to_end(key)
        while self.used > self.size:
            _, (tokens, _) = entries.popitem(last=False)
            self.used -= tokens
