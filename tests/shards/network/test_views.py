from __future__ import annotations

from dataclasses import replace

import torch

from shards.kv.cache import KvCache
from shards.kv.window_cache import WindowCache
from shards.network.config import NetworkConfig, Rope
from shards.network.views import kv_views
from tests.shards.tiny_checkpoints import a_batch, some_tokens

CONFIG = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 2, 1, 16, 512, 1e-6, Rope(), (70, None, 70, 70, None))


def test_a_layer_has_a_place_among_those_of_its_kind() -> None:
    assert CONFIG.kv_places == (0, 0, 1, 2, 1)
    assert CONFIG.of_layers(windowed=True).windows == (70, 70, 70)
    assert CONFIG.of_layers(windowed=False).windows == (None, None)
    assert (CONFIG.window, CONFIG.of_layers(windowed=False).window) == (70, None)


def test_one_pool_is_seen_alike_by_all_layers() -> None:
    batch, cache = a_batch((some_tokens(3), 0, (5,))), KvCache(CONFIG, 6)
    plain, windowed = kv_views(CONFIG, batch, cache)
    assert plain is windowed
    assert plain.batch is batch
    assert plain.places == (0, 1, 2, 3, 4)


def test_layers_with_a_window_see_pages_from_the_first_visible_block_on() -> None:
    cache = WindowCache(CONFIG, 6, 3, dtype=torch.float32, computed=torch.float32)
    batch = a_batch((some_tokens(10), 190, (5, 1, 0, 4)), (some_tokens(1), 3, (2,)))
    # 190 sees 121 to 190: the first of its blocks has no page any more
    pages = torch.tensor([1, 2, 0, 3, 1, 3, 3], dtype=torch.int32)
    plain, windowed = kv_views(CONFIG, replace(batch, window_pages=pages), cache)
    assert plain.batch.rows == batch.rows
    assert plain.cache is cache.plain
    assert plain.places == windowed.places == (0, 0, 1, 2, 1)
    assert [row.blocks for row in windowed.batch.rows] == [(0, 2, 1, 1), (0,)]
    assert windowed.batch.slots.tolist() == [*range(64 + 62, 64 + 64), *range(64, 64 + 8), 3]
    assert (cache.plain.data.shape[0], cache.windowed.data.shape[0]) == (2, 3)
