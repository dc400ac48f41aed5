"""Folds engines' cache events into the index: blocks of any size become ours of 64 tokens, with our keys."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from backends.events.nouns import CacheEvent, Cleared, Removed, Stored
from policies.prefix.folding import Changes, Folder
from policies.prefix.members import TIERS
from router.fleet.beliefs import Beliefs
from router.fleet.feeds.sink import RankCache
from router.fleet.prompt_keys import NO_DOMAIN
from shards.kv.keys import block_keys, root_key

_MOST_NAMES = 4
"""Most names of one model at an engine: its blocks are kept under each of them."""

_ADAPTERS = ""
"""Marks the folders of adapters, which are named by the engine's names for the adapters."""


@dataclass(slots=True)
class _Cache:
    """One source's folders, by the names of its model, and its name in the index.

    Its blocks have `block_tokens` tokens. `is_salted`: it gets cache domains as salts. `reports_salts`: one of its
    events had a domain of ours as the salt of a prompt.
    """

    name: str
    folders: dict[str, Folder]
    is_salted: bool
    block_tokens: int = 0
    reports_salts: bool = False


class FoldingSink:
    """Tells `beliefs` which blocks each source holds. `models_of` gives the backend's names for its model; empty while
    unknown. Some engines have several names for one model. `is_domain` knows the cache domains of this router, and
    `is_salted` whether a backend gets them as salts. For each engine and model `most_blocks` are kept.

    A prompt's cache salt is its cache domain, because the router derives one from the other. An adapter counts as a
    model of its own, under the engine's name for it, as in prompts. Blocks with an image are left out with
    all that continue them, and so are blocks that no prompt of this router can match: those with a salt at an engine
    that gets none, and those without a salt at an engine that gets salts and reports them.
    """

    def __init__(
        self,
        beliefs: Beliefs,
        models_of: Callable[[str], Collection[str]],
        is_domain: Callable[[str], bool] = lambda _: True,
        is_salted: Callable[[str], bool] = lambda _: True,
        *,
        most_blocks: int = 200_000,
    ) -> None:
        self._beliefs, self._models_of, self._is_domain, self._is_salted = beliefs, models_of, is_domain, is_salted
        self._caches: dict[RankCache, _Cache] = {}
        self._most_blocks = most_blocks

    def __repr__(self) -> str:
        return f"<FoldingSink of {', '.join(map(str, self._caches)) or 'none'}>"

    def hear(self, source: RankCache, event: CacheEvent) -> None:
        """`source` says `event`."""
        cache = self._caches.get(source) or self._met(source)
        match event:
            case Cleared():
                cache.folders.clear()
                self._beliefs.emptied(cache.name, is_empty=event.is_empty)
            case Removed(hashes, tier):
                for folder in cache.folders.values():
                    for each in TIERS if tier is None else (tier,):
                        self._apply(cache, folder.evict(hashes, tier=each))
            case Stored():
                self._store(source, cache, event)

    def forget(self, backend: str) -> None:
        """See EventSink. The owner of the index clears the index itself."""
        for source in [each for each in self._caches if each.backend == backend]:
            del self._caches[source]

    def _met(self, source: RankCache) -> _Cache:
        name = self._beliefs.joined(source.backend, source.rank)
        cache = self._caches[source] = _Cache(name, {}, self._is_salted(source.backend))
        if not cache.is_salted:
            self._beliefs.set_salts(name, are_reported=False)
        return cache

    def _store(self, source: RankCache, cache: _Cache, event: Stored) -> None:
        begins = event.parent is None and bool(event.token_ids)
        if begins and not self._may_be_ours(cache, event.salt):
            return
        # tokens do not identify a block with an image, nor any block that continues it
        named = next((at for at, keys in enumerate(event.extra_keys) if keys), len(event.hashes))
        if not named:
            return
        if event.block_tokens > cache.block_tokens:
            cache.block_tokens = event.block_tokens
            self._beliefs.parity.block_tokens(self._beliefs.holder(cache.name), event.block_tokens)
        size = len(event.token_ids) // len(event.hashes)
        for folder, model in self._folders(source, cache, event.adapter):
            changes = folder.store(
                event.hashes[:named],
                parent=event.parent,
                token_ids=event.token_ids[: named * size],
                root=root_key(model, event.salt or NO_DOMAIN),
                tier=event.tier,
            )
            self._apply(cache, changes)
            if folder.dropped:
                self._beliefs.left_out(cache.name)

    def _may_be_ours(self, cache: _Cache, salt: str | None) -> bool:
        """Whether a prompt with such blocks and this salt can come from this router or from another one like it."""
        if not cache.is_salted:
            return not salt
        if not cache.reports_salts and (salt is None or self._is_domain(salt)):
            cache.reports_salts = salt is not None
            self._beliefs.set_salts(cache.name, are_reported=cache.reports_salts)
        return salt is not None or not cache.reports_salts

    def _folders(self, source: RankCache, cache: _Cache, adapter: str | None) -> list[tuple[Folder, str]]:
        """The folders of such blocks, each with the name that is part of their keys."""
        if adapter is not None:
            return [(self._folder(cache, _ADAPTERS), adapter)]
        models = sorted(self._models_of(source.backend))[:_MOST_NAMES]
        return [(self._folder(cache, model), model) for model in models]

    def _folder(self, cache: _Cache, name: str) -> Folder:
        folder = cache.folders.get(name)
        if folder is None:
            folder = cache.folders[name] = Folder(block_keys, most_parts=self._most_blocks)
        return folder

    def _apply(self, cache: _Cache, changes: Changes) -> None:
        for run in changes.runs:
            (self._beliefs.stored if run.stored else self._beliefs.evicted)(cache.name, run.keys, run.tier)
        if changes.has_hole:
            self._beliefs.index.expect_holes(cache.name)
