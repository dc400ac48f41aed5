"""The plainest reader of cache events: it remembers each block and the caches that hold it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from backends.events.nouns import BlockHash, CacheEvent, Cleared, Removed, Stored
from router.fleet.feeds.sink import RankCache
from tests.router.fleet.feeds.engine import Content


@dataclass
class Fold:
    """Reads one source. A block with an unknown parent, or without its tokens, counts as held by no backend."""

    known: dict[BlockHash, Content] = field(default_factory=dict)
    tiers: dict[Content, set[str]] = field(default_factory=dict)
    heard: list[CacheEvent] = field(default_factory=list)

    def hear(self, source: RankCache, event: CacheEvent) -> None:
        self.heard.append(event)
        match event:
            case Cleared():
                self.known.clear()
                self.tiers.clear()
            case Removed(hashes, tier):
                for name in hashes:
                    content = self.known.get(name)
                    if content is not None:
                        self._leave(content, tier)
            case Stored():
                self._store(event)

    def forget(self, backend: str) -> None:
        self.known.clear()
        self.tiers.clear()

    def claims(self, tier: str | None = None) -> frozenset[Content]:
        return frozenset(content for content, tiers in self.tiers.items() if tiers and (tier is None or tier in tiers))

    def _store(self, event: Stored) -> None:
        if not event.token_ids:
            for name in event.hashes:
                if name in self.known:
                    self.tiers.setdefault(self.known[name], set()).add(event.tier)
            return
        before: Content | None = (event.salt, ()) if event.parent is None else self.known.get(event.parent)
        tokens = struct.unpack(f"<{len(event.token_ids) // 4}I", event.token_ids)
        for place, name in enumerate(event.hashes):
            if before is None or (event.extra_keys and event.extra_keys[place]):
                return
            before = (before[0], before[1] + tokens[place * event.block_tokens : (place + 1) * event.block_tokens])
            self.known[name] = before
            self.tiers.setdefault(before, set()).add(event.tier)

    def _leave(self, content: Content, tier: str | None) -> None:
        if tier is None:
            self.tiers.pop(content, None)
        elif content in self.tiers:
            self.tiers[content].discard(tier)
