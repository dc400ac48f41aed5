from __future__ import annotations

import numpy as np
import pytest
import torch

from shards.gpu import static
from shards.gpu.cache import GpuCache
from shards.gpu.layout import (
    Layout,
    Size,
    bucket_for,
    decode_buckets,
    decode_fields,
    mixed_fields,
    mixed_sizes,
)
from shards.gpu.static import StaticBuffers
from shards.network.config import NetworkConfig, Rope


def test_what_is_written_on_the_host_is_read_on_the_device() -> None:
    layout = Layout.of(mixed_fields(Size(tokens=5, rows=3, decoding=1, drawn=2, tiles=4), 3))
    layout.check()
    host = torch.zeros(layout.words, dtype=torch.int32)
    arrays, tensors = layout.arrays(host.numpy()), layout.tensors(host)
    arrays["seed"][:] = (-1, 2**62)
    arrays["temperature"][:] = (0.5, 2.0)
    arrays["tiles"][:] = np.arange(16).reshape(4, 4)
    assert tensors["seed"].tolist() == [-1, 2**62]
    assert tensors["temperature"].tolist() == [0.5, 2.0]
    assert tensors["tiles"].tolist() == np.arange(16).reshape(4, 4).tolist()
    assert not tensors["tables"].any()
    names = ("wanted", "source", "context", "seen", "first_queries", "tables")
    assert [tuple(tensors[name].shape) for name in names] == [(2,), (5,), (3,), (3,), (4,), (3, 3)]


@pytest.mark.parametrize("rows", [1, 2, 7, 256])
def test_fields_are_aligned_and_apart_whatever_their_sizes(rows: int) -> None:
    Layout.of(decode_fields(rows, 5)).check()
    Layout.of(mixed_fields(Size(rows + 3, rows + 1, rows, rows, 9), 2)).check()


def test_the_width_of_the_tables_moves_nothing_before_them() -> None:
    narrow, wide = Layout.of(decode_fields(8, 0)), Layout.of(decode_fields(8, 77))
    assert narrow.fields[:-1] == wide.fields[:-1]
    assert wide.fields[-1].start == narrow.words


def test_buckets_are_fine_for_small_batches_and_coarser_above() -> None:
    assert decode_buckets(32) == (1, 2, 4, 8, 16, 24, 32)
    assert decode_buckets(3) == (1, 2)
    assert len(decode_buckets(256)) == 35
    assert decode_buckets(400)[-4:] == (248, 256, 320, 384)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (8, 8), (9, 16), (17, None)])
def test_rows_go_into_the_smallest_bucket_that_holds_them(rows: int, bucket: int | None) -> None:
    assert bucket_for(rows, decode_buckets(16)) == bucket


def test_steps_with_chunks_are_padded_to_multiples_of_64_tokens_of_few_or_all_rows() -> None:
    sizes = mixed_sizes(512, 256, tile_tokens=32)
    assert sizes == tuple(sorted(sizes))
    by_tokens = {tokens: [size.drawn for size in sizes if size.tokens == tokens] for tokens in range(64, 513, 64)}
    assert by_tokens == {
        64: [64],
        128: [96, 128],
        192: [96, 192],
        **{count: [96, 256] for count in range(256, 513, 64)},
    }
    # half as many graphs where no more sequences run, as by default
    assert [size.drawn for size in mixed_sizes(512, 64, tile_tokens=32)] == [64] * 8
    assert mixed_sizes(0, 64, tile_tokens=32) == ()


@pytest.mark.parametrize(
    ("tokens", "rows", "drawn", "tiles", "fits"),
    [
        (128, 64, 64, 20, True),
        (129, 3, 3, 5, False),
        (128, 65, 64, 20, False),
        (128, 3, 65, 20, False),
        (128, 3, 3, 21, False),
        # two tiles for the tokens that are left
        (96, 3, 0, 18, True),
        (96, 3, 0, 20, False),
    ],
)
def test_a_size_has_room_for_tokens_rows_draws_tiles_and_padding(
    tokens: int, rows: int, drawn: int, tiles: int, fits: bool
) -> None:
    size = Size(tokens=128, rows=65, decoding=64, drawn=64, tiles=20)
    assert size.holds(tokens=tokens, rows=rows, drawn=drawn, tiles=tiles, tile_tokens=32) is fits


def a_static(*, blocks: int, most_positions: int) -> StaticBuffers:
    """For 4 rows in two layers, the second with a window of 100; a result of a split takes 144 bytes."""
    config = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 4, 2, 8, most_positions, 1e-6, Rope(), (None, 100))
    cpu = torch.device("cpu")
    cache = GpuCache(config, blocks, dtype=torch.float32, device=cpu)
    return StaticBuffers(config, cache, 4, device=cpu, dtype=torch.float32)


def test_full_buffers_are_noticed_before_a_step_and_not_by_lost_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "LEAST_BYTES", 0)
    buffers = a_static(blocks=16, most_positions=4096)
    # 16 blocks are 2 splits, and each of 4 rows may have begun one more
    assert buffers.has_room([512] * 4)
    assert buffers.has_room([1024, 512, 512, 512])
    assert buffers.has_room([512, 1536, 513])
    assert not buffers.has_room([1025, 1025, 513])
    assert not buffers.has_room([4097])
    assert [len(plan.first_splits) for plan in buffers.plans(3).values()] == [4, 4]


def test_rows_that_share_their_blocks_have_room_though_the_cache_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "LEAST_BYTES", 144 * 20)
    assert a_static(blocks=1, most_positions=4096).has_room([5 * 512] * 4)
    assert not a_static(blocks=1, most_positions=4096).has_room([5 * 512 + 1] * 4)
    # never more than the longest contexts need
    plans = a_static(blocks=1000, most_positions=1024).plans(4)
    assert {window: len(plan.partial) for window, plan in plans.items()} == {None: 8, 100: 8}
