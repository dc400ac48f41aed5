from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shards.kv.cache import KvCache
from shards.network.config import NetworkConfig, Rope
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.loading import load_weights, random_weights
from tests.shards.tiny_checkpoints import KINDS, VOCABULARY, a_batch, save_checkpoint, some_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

TOLERANCE = 1e-4
PROMPT = 140
SCATTERED = (9, 2, 3)


@dataclass
class Pair:
    """The same checkpoint in transformers and here."""

    model: Any
    config: NetworkConfig
    decoder: Decoder

    def expected(self, token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0].float()
        return logits

    def cache(self, blocks: int = 40) -> KvCache:
        cache = KvCache(self.config, blocks)
        cache.data.fill_(float("nan"))
        return cache


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_checkpoint(folder, request.param)
    config = read_config(folder)
    return Pair(model, config, Decoder(config, load_weights(folder, config)))


def assert_agree(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max().item() < TOLERANCE


def test_a_whole_prompt_gives_the_logits_of_transformers(pair: Pair) -> None:
    tokens = some_tokens(PROMPT)
    expected = pair.expected(tokens)
    assert expected.std() > 0.5
    assert_agree(pair.decoder.forward(a_batch((tokens, 0, (4, 5, 6))), pair.cache()), expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_cut_into_chunks_does_not_show(pair: Pair, chunk: int) -> None:
    tokens, cache = some_tokens(PROMPT), pair.cache()
    steps = [
        pair.decoder.forward(a_batch((tokens[done : done + chunk], done, SCATTERED)), cache)
        for done in range(0, PROMPT, chunk)
    ]
    assert_agree(torch.cat(steps), pair.expected(tokens))


def test_a_prefix_computed_for_another_sequence_serves(pair: Pair) -> None:
    tokens, cache = some_tokens(PROMPT), pair.cache()
    other = tokens[:128] + some_tokens(20, seed=1)
    pair.decoder.forward(a_batch((tokens, 0, SCATTERED)), cache)
    ours = pair.decoder.forward(a_batch((other[128:], 128, (9, 2, 17))), cache)
    assert_agree(ours, pair.expected(other)[128:])


def test_neighbours_in_a_batch_do_not_show(pair: Pair) -> None:
    lengths = (150, 1, 64, 65, 33, 128, 7, 100)
    prompts = [some_tokens(length, seed=length) for length in lengths]
    blocks = [tuple(range(30 - 3 * row, 33 - 3 * row)) if row % 2 else (31 + row, row, 20 + row) for row in range(8)]
    computed = [length // 2 if row % 3 else length - 1 for row, length in enumerate(lengths)]
    cache = pair.cache()
    before = [(prompt[:done], 0, held) for prompt, done, held in zip(prompts, computed, blocks, strict=True) if done]
    pair.decoder.forward(a_batch(*before), cache)
    rest = zip(prompts, computed, blocks, strict=True)
    ours = pair.decoder.forward(a_batch(*((prompt[done:], done, held) for prompt, done, held in rest)), cache)
    expected = [pair.expected(prompt)[done:] for prompt, done in zip(prompts, computed, strict=True)]
    assert_agree(ours, torch.cat(expected))


def test_only_the_wanted_logits_come_back(pair: Pair) -> None:
    tokens = some_tokens(20)
    everything = pair.decoder.forward(a_batch((tokens, 0, (3,))), pair.cache())
    wanted = pair.decoder.forward(a_batch((tokens, 0, (3,)), wanted=[19, 4]), pair.cache())
    torch.testing.assert_close(wanted, everything[[19, 4]])


def test_a_chunk_of_which_no_logits_are_wanted_is_in_the_cache_all_the_same(pair: Pair) -> None:
    tokens, cache = some_tokens(70), pair.cache()
    nothing = pair.decoder.forward(a_batch((tokens[:69], 0, (3, 1)), wanted=[]), cache)
    assert nothing.shape == (0, VOCABULARY)
    assert_agree(pair.decoder.forward(a_batch((tokens[69:], 69, (3, 1))), cache), pair.expected(tokens)[69:])


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen2, window from layer 1, yarn",
        "qwen3",
        "gemma3",
        "glm4",
        "olmo2",
        "qwen3 moe",
        "gpt-oss",
        "deepseek v3",
        "phi3, part of each head, longrope",
    ],
)
def test_bfloat16_errs_no_more_than_transformers_does(kind: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, kind, dtype=torch.bfloat16)
    config = read_config(tmp_path)
    pair = Pair(model, config, Decoder(config, load_weights(tmp_path, config)))
    tokens, cache = some_tokens(PROMPT), KvCache(config, 40, dtype=torch.bfloat16)
    cache.data.fill_(float("nan"))
    # half of it token by token, since one token takes another way through attention
    half = PROMPT // 2
    logits = [pair.decoder.forward(a_batch((tokens[:half], 0, SCATTERED)), cache)]
    logits += [
        pair.decoder.forward(a_batch((tokens[done : done + 1], done, SCATTERED)), cache) for done in range(half, PROMPT)
    ]
    theirs = pair.expected(tokens)
    model.float()
    exact = pair.expected(tokens)
    our_errors, their_errors = (torch.cat(logits) - exact).abs(), (theirs - exact).abs()
    assert our_errors[:half].mean() < 1.25 * their_errors[:half].mean()
    assert our_errors[half:].mean() < 1.25 * their_errors[half:].mean()


def test_a_longer_past_than_a_mask_may_cover_changes_nothing() -> None:
    config = NetworkConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        heads=2,
        kv_heads=1,
        head_dim=16,
        max_positions=2048,
        rms_norm_eps=1e-6,
        rope=Rope(),
        windows=(None, 100),
    )
    decoder = Decoder(config, random_weights(config, 0))
    tokens, blocks = some_tokens(1000), tuple(range(16))
    whole = decoder.forward(a_batch((tokens, 0, blocks)), KvCache(config, 16))
    cache = KvCache(config, 16)
    parts = [decoder.forward(a_batch((tokens[at : at + 300], at, blocks[::-1])), cache) for at in range(0, 1000, 300)]
    assert_agree(torch.cat(parts), whole)
