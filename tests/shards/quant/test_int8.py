from __future__ import annotations

import pytest
import torch

from shards.kv.cache import KvCache
from shards.network.config import NetworkConfig, Rope
from shards.network.decoder import Decoder
from shards.network.loading import random_weights
from shards.quant import int8
from shards.quant.int8 import Int8Linear, packing_is_exact, quantise_rows
from tests.shards.tiny_checkpoints import a_batch, some_tokens

SMALL, LARGE = (48, 80), (600, 520)
"""[out, in] of a matrix that stays as it is, and of one that is packed where torch can."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(matrix: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Int8Linear:
    with monkeypatch.context() as patch:
        patch.setattr(int8, "_FEW_ELEMENTS", 1 << 40)
        return Int8Linear.quantise([matrix])


def test_a_row_of_a_matrix_comes_back_to_half_a_step() -> None:
    matrix = random(20, 30) * torch.logspace(-6, 6, 20).unsqueeze(1)
    rounded, scales = quantise_rows(matrix)
    assert rounded.abs().amax(-1).eq(127).all()
    assert ((rounded * scales.unsqueeze(1) - matrix).abs() <= scales.unsqueeze(1) * 0.5001).all()


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_the_product_errs_by_little_more_than_a_percent(shape: tuple[int, int]) -> None:
    matrix, hidden, bias = random(*shape), random(3, 5, shape[1], seed=1), random(shape[0], seed=2)
    product = Int8Linear.quantise([matrix[:7], matrix[7:]], bias)(hidden)
    exact = hidden @ matrix.T + bias
    assert product.shape == exact.shape
    assert (product - exact).norm() / exact.norm() < 0.015


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_row_alone_gets_the_very_bits_it_gets_beside_63_others(shape: tuple[int, int]) -> None:
    linear, hidden = Int8Linear.quantise([random(*shape)]), random(64, shape[1], seed=1)
    hidden[5] *= 1000
    hidden[6, 3] = float("inf")
    together = linear(hidden)
    for row in (0, 4, 5, 7, 63):
        assert torch.equal(linear(hidden[row : row + 1])[0], together[row])
        assert torch.equal(linear(hidden[row : row + 2])[0], together[row])


def test_both_ways_to_multiply_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not packing_is_exact():
        pytest.skip("this CPU has one way only")
    matrix = random(*LARGE)
    packed, unpacked = Int8Linear.quantise([matrix]), plain(matrix, monkeypatch)
    assert (packed.is_packed, unpacked.is_packed) == (True, False)
    for rows in (1, 2, 33):
        hidden = random(rows, LARGE[1], seed=rows)
        assert torch.equal(packed(hidden), unpacked(hidden))


def test_a_matrix_that_is_kept_twice_gives_the_same_bits() -> None:
    matrix, hidden = random(*LARGE), random(1, LARGE[1], seed=1)
    assert torch.equal(Int8Linear.quantise([matrix], keeps_plain=True)(hidden), Int8Linear.quantise([matrix])(hidden))


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_extremes_neither_wrap_nor_saturate(shape: tuple[int, int]) -> None:
    signs = random(*shape).sign()
    hidden = torch.cat((signs[:1], -signs[:1], torch.zeros(1, shape[1])))
    product = Int8Linear.quantise([signs])(hidden)
    torch.testing.assert_close(product, hidden @ signs.T)
    assert product[2].eq(0).all()


def test_what_is_no_number_stays_none_and_stays_in_its_row() -> None:
    linear, hidden = Int8Linear.quantise([random(*SMALL)]), random(3, SMALL[1], seed=1)
    hidden[0, 0], hidden[1, 0] = float("nan"), float("-inf")
    product = linear(hidden)
    assert not product[:2].isfinite().any()
    assert product[2].isfinite().all()


def test_half_precision_goes_in_and_float32_comes_out() -> None:
    linear, hidden = Int8Linear.quantise([random(*SMALL)]), random(3, SMALL[1]).bfloat16()
    assert torch.equal(linear(hidden), linear(hidden.float()))


def test_a_torch_that_cannot_pack_still_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    linear = Int8Linear.quantise([random(*LARGE)])
    assert repr(linear) == "Int8Linear(520 to 600, plain)"
    assert linear(random(2, LARGE[1])).isfinite().all()


def test_a_sequence_alone_gets_the_very_logits_it_gets_beside_others() -> None:
    config = NetworkConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        heads=4,
        kv_heads=2,
        head_dim=32,
        max_positions=512,
        rms_norm_eps=1e-6,
        rope=Rope(),
        windows=(None, None),
        qkv_bias=True,
        query_key_norm=True,
    )
    decoder = Decoder(config, random_weights(config, 0, is_int8=True))
    prompts = [(some_tokens(40 + row, row), 0, (2 * row, 2 * row + 1)) for row in range(16)]

    def logits(rows: list[int]) -> torch.Tensor:
        """Of the first of `rows`: its prompt's, and those of a token after it."""
        cache = KvCache(config, 32)
        prefilled = decoder.forward(a_batch(*(prompts[row] for row in rows)), cache)
        drawn = decoder.forward(a_batch(*(([1], 40 + row, prompts[row][2]) for row in rows)), cache)
        return torch.cat((prefilled[: 40 + rows[0]], drawn[:1]))

    everybody = list(range(16))
    assert torch.equal(logits([0]), logits(everybody))
    assert torch.equal(logits([7]), logits([7, *everybody[8:]]))
