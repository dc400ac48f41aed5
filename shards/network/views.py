"""A batch as the layers of a network see it: their KV may be in two memories."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from shards.exec.batch import Batch, Row
from shards.kv.cache import KvCache
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.window_cache import WindowCache
from shards.kv.window_layout import KvWindow
from shards.network.config import NetworkConfig


class KvView(NamedTuple):
    """A batch with slots and tables of `cache`, and the place of each of its layers there, by the layer's number."""

    batch: Batch
    cache: KvCache
    places: tuple[int, ...]


def kv_views(config: NetworkConfig, batch: Batch, cache: KvCache | WindowCache) -> tuple[KvView, KvView]:
    """The views of layers without a window, and of those with one."""
    if isinstance(cache, KvCache):
        whole = KvView(batch, cache, tuple(range(config.layers)))
        return whole, whole
    assert config.window is not None, "no layer has a window"
    places = config.kv_places
    return KvView(batch, cache.plain, places), KvView(_of_pages(batch, config.window), cache.windowed, places)


def _of_pages(batch: Batch, window: int) -> Batch:
    """`batch` with slots and tables of pages. A table has 0 for the blocks before those that its first token sees."""
    assert batch.window_pages is not None, "the batch has no pages"
    pages = batch.window_pages
    slots = pages[batch.slots // BLOCK_TOKENS].long() * BLOCK_TOKENS + batch.slots % BLOCK_TOKENS
    rows = tuple(_row_of_pages(row, pages, KvWindow(window, 0)) for row in batch.rows)
    return replace(batch, slots=slots, rows=rows)


def _row_of_pages(row: Row, pages: Tensor, window: KvWindow) -> Row:
    first = window.first_seen(row.context_tokens - row.tokens)
    return row._replace(blocks=(0,) * first + tuple(pages[list(row.blocks[first:])].tolist()))
