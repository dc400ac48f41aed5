"""From engines' cache events to the index: blocks of any size, named anew by their tokens, as ours of 64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.events.nouns import CacheEvent, Cleared, Removed, Stored
from policies.prefix.folding import Changes, Folder
from policies.prefix.members import TIERS
from router.beliefs import Beliefs
from router.feeds.sink import Source
from shards.kv.keys import block_keys, root_key


@dataclass(frozen=True, slots=True)
class _Cache:
    """One source's folder, and its name in the index."""

    folder: Folder
    name: str


class FoldingSink:
    """Tells `beliefs` what each source holds. `model_of` is what the backend calls its model, None while nobody knows.

    A prompt's cache salt is its cache domain, since the router sets the one by the other; prompts without a salt, of
    an adapter, or with images belong to nobody who asks here, and are left out with all that continues them.
    """

    def __init__(self, beliefs: Beliefs, model_of: Callable[[str], str | None]) -> None:
        self._beliefs, self._model_of = beliefs, model_of
        self._caches: dict[Source, _Cache] = {}

    def __repr__(self) -> str:
        return f"<FoldingSink of {', '.join(map(str, self._caches)) or 'nobody'}>"

    def hear(self, source: Source, event: CacheEvent) -> None:
        """`source` says `event`."""
        cache = self._caches.get(source)
        if cache is None:
            name = self._beliefs.joined(source.backend, source.rank)
            cache = self._caches[source] = _Cache(Folder(block_keys), name)
        match event:
            case Cleared():
                cache.folder.clear()
                self._beliefs.index.clear(cache.name)
            case Removed(hashes, tier):
                for one in TIERS if tier is None else (tier,):
                    self._apply(cache, cache.folder.evict(hashes, tier=one))
            case Stored():
                self._store(source, cache, event)

    def forget(self, backend: str) -> None:
        """See EventSink. What the index knows of it is for its owner to forget."""
        for source in [one for one in self._caches if one.backend == backend]:
            del self._caches[source]

    def _store(self, source: Source, cache: _Cache, event: Stored) -> None:
        model = self._model_of(source.backend)
        begins = event.parent is None and bool(event.token_ids)
        if model is None or event.adapter is not None or (begins and not event.salt):
            return
        # a block that an image is in is not named by its tokens, nor is what continues it
        named = next((at for at, keys in enumerate(event.extra_keys) if keys), len(event.hashes))
        if not named:
            return
        size = len(event.token_ids) // len(event.hashes)
        changes = cache.folder.store(
            event.hashes[:named],
            parent=event.parent,
            token_ids=event.token_ids[: named * size],
            root=root_key(model, event.salt or ""),
            tier=event.tier,
        )
        self._apply(cache, changes)

    def _apply(self, cache: _Cache, changes: Changes) -> None:
        index = self._beliefs.index
        for run in changes.runs:
            (index.store if run.stored else index.evict)(cache.name, run.keys, run.tier)
        if changes.has_hole:
            index.expect_holes(cache.name)
