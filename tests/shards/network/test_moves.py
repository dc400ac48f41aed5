"""KV at other positions: what a decoder moves is what it would have computed there, as far as that depends on nothing
else.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shards.exec.moves import KvMove
from shards.gpu.blending import Blending
from shards.gpu.cache import GpuCache
from shards.kv.cache import Extent, extents_of
from shards.kv.quantised import make_cache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.loading import load_weights
from tests.shards.tiny_checkpoints import KINDS, a_batch, save_checkpoint, some_tokens


@pytest.fixture(scope="module", params=list(KINDS))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder, request.param)
    config = read_config(folder)
    return Decoder(config, load_weights(folder, config, dtype="float32"))


def test_keys_and_values_of_the_first_layer_are_those_of_the_new_position(decoder: Decoder) -> None:
    cache = make_cache(decoder.config, 8, dtype=torch.float32, computed=torch.float32)
    tokens = some_tokens(100)
    decoder.forward(a_batch((tokens, 0, [5, 2])), cache)
    # behind 70 other tokens, in blocks that do not lie side by side
    decoder.forward(a_batch(([*some_tokens(70, 1), *tokens], 0, [0, 3, 6])), cache)
    move = KvMove((5, 2), 10, (7, 1, 4), 80, 90)
    decoder.blend(move, cache)
    moved, computed = (torch.cat(cache.read(0, extents_of(blocks, 80, 170))) for blocks in (move.target, (0, 3, 6)))
    torch.testing.assert_close(moved, computed, rtol=0.0, atol=1e-4)


def test_a_move_to_the_same_position_changes_nothing_in_any_layer(decoder: Decoder) -> None:
    cache = make_cache(decoder.config, 4, dtype=torch.float32, computed=torch.float32)
    decoder.forward(a_batch((some_tokens(100), 0, [0, 1])), cache)
    decoder.blend(KvMove((0, 1), 3, (2, 3), 3, 97), cache)
    for layer in range(decoder.config.layers):
        for was, now in zip(
            cache.read(layer, [Extent(3, 97)]), cache.read(layer, [Extent(2 * 64 + 3, 97)]), strict=True
        ):
            torch.testing.assert_close(now, was, rtol=0.0, atol=1e-6)
    assert max(decoder.deviations(KvMove((0, 1), 3, (2, 3), 3, 97), cache)) < 1e-9


def test_tokens_that_depend_on_what_stands_before_them_deviate(decoder: Decoder) -> None:
    cache = make_cache(decoder.config, 8, dtype=torch.float32, computed=torch.float32)
    tokens = some_tokens(30)
    decoder.forward(a_batch((tokens, 0, [0])), cache)
    decoder.forward(a_batch(([*some_tokens(25, 1), *tokens], 0, [1])), cache)
    deviations = decoder.deviations(KvMove((0,), 0, (1,), 25, 30), cache)
    assert len(deviations) == 30
    assert min(deviations) > 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_stored_in_fewer_bits_it_differs_by_what_these_bits_leave_open(decoder: Decoder, dtype: torch.dtype) -> None:
    computed = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    small = make_cache(decoder.config, 4, dtype=dtype, computed=computed)
    exact = make_cache(decoder.config, 4, dtype=torch.float32, computed=torch.float32)
    keys_values = torch.randn(60, decoder.config.kv_planes * decoder.config.kv_heads, decoder.config.head_dim)
    for cache in (small, exact):
        for layer in range(decoder.config.layers):
            cache.write(layer, torch.arange(60), keys_values.to(cache.dtype))
        decoder.blend(KvMove((0,), 0, (1, 2), 30, 60), cache)
    for layer in range(decoder.config.layers):
        near, right = (torch.cat(cache.read(layer, [Extent(94, 60)])).float() for cache in (small, exact))
        bound = {torch.int8: 0.03, torch.bfloat16: 0.02}.get(dtype, 0.3)
        torch.testing.assert_close(near, right, rtol=0.0, atol=bound * float(keys_values.abs().max()) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_a_gpus_cache_moves_as_the_decoder_does(decoder: Decoder, dtype: torch.dtype) -> None:
    config = decoder.config
    if config.latent is not None:
        pytest.skip("a GPU computes no latent attention")
    ours = make_cache(config, 6, dtype=dtype, computed=torch.float32)
    theirs = GpuCache(config, 6, dtype=dtype, device=torch.device("cpu"))
    decoder.forward(a_batch((some_tokens(100), 0, [4, 1])), ours)
    # the same memory in the other's order
    theirs.data[:6] = ours.planes[0]
    if theirs.scales is not None:
        theirs.scales[:6] = ours.planes[1]
    move, blending = (
        KvMove((4, 1), 5, (0, 3, 2), 70, 90),
        Blending(theirs, config),
    )
    decoder.blend(move, ours)
    blending.blend(move)
    for block in move.target[1:]:
        mine = ours.planes[0][block].float()
        torch.testing.assert_close(theirs.data[block].float()[..., 6:32, :], mine[..., 6:32, :], rtol=0.0, atol=1.01)
    expected = decoder.deviations(KvMove((4, 1), 0, (0, 3, 2), 70, 90), ours)
    measured = blending.deviations(KvMove((4, 1), 0, (0, 3, 2), 70, 90))
    assert measured == pytest.approx(expected, rel=1e-2, abs=1e-6)
