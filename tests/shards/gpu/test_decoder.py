"""The GPU's decoder against transformers and against the CPU's, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shards.engine import Engine, EngineOptions
from shards.exec.drawing import Drawing, Sample
from shards.gpu import dense
from shards.gpu.decoder import GpuDecoder, query_growth
from shards.gpu.dense import dense_attention
from shards.gpu.mlp import PackedMatrix
from shards.gpu.network import GpuNetwork
from shards.gpu.spans import Span, step_of_spans
from shards.gpu.step import StepOptions
from shards.gpu.weights import moved
from shards.kv.cache import KvCache
from shards.model import Model
from shards.network.config import NetworkConfig
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.loading import load_weights
from shards.network.rope import RotaryEmbedding
from shards.nouns import SamplingParams, Submission
from tests.shards.dense import skipped_where_dense_attention_has_no_float32
from tests.shards.quantised_checkpoints import save_quantised
from tests.shards.tiny_checkpoints import a_batch, save_checkpoint, some_tokens

Answers = list[list[int | None]]

TOLERANCE = 1e-3
BLOCKS = 40
FAMILIES = [
    "llama",
    "mistral, window",
    "qwen2, window from layer 1, yarn",
    "qwen3",
]
OTHERS = [
    "phi3, part of each head, longrope",
    "glm4",
    "olmo2",
    "gemma3",
    "mistral3, growing queries",
    "gpt-oss",
    "glm4 moe",
]
"""Families with other parts around the same attention, for which a few tokens suffice."""


@dataclass
class Checkpoint:
    """The same weights in transformers, in the CPU's decoder and on the device."""

    model: Any
    config: NetworkConfig
    on_cpu: Decoder
    network: GpuNetwork

    def expected(self, token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0].float()
        return logits


def a_checkpoint(
    folder: Path,
    kind: str,
    device: torch.device,
    *,
    options: StepOptions | None = None,
    kv_dtype: torch.dtype | None = None,
    is_dense: bool = False,
) -> Checkpoint:
    model = save_checkpoint(folder, kind)
    config = read_config(folder)
    weights = load_weights(folder, config)
    on_device = moved(weights, config, device=device, dtype=torch.float32)
    decoder = GpuDecoder(config, on_device, dense="flash" if is_dense else None)
    network = GpuNetwork(decoder, kv_dtype=kv_dtype, options=options or StepOptions(rows=8))
    network.allocate(BLOCKS)
    cache = network.steps.cache
    # memory that was not written spoils its reader
    cache.data.view(torch.uint8).fill_(0x7F if cache.data.itemsize == 1 else 0xFF)
    return Checkpoint(model, config, Decoder(config, weights), network)


def assert_agree(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.dtype == torch.float32
    assert theirs.std() > 0.5
    assert (ours.cpu() - theirs).abs().max().item() < tolerance


@pytest.mark.parametrize("kind", FAMILIES)
def test_chunks_and_single_tokens_give_the_logits_of_transformers_and_of_the_cpu(
    tmp_path: Path, device: torch.device, kind: str
) -> None:
    pair = a_checkpoint(tmp_path, kind, device)
    first, second = some_tokens(68), some_tokens(12, seed=1)
    steps = [
        # two chunks, then a chunk beside a decoding row in front of it and behind it, then rows of one token each
        [(first[:65], 0, (9, 2)), (second[:7], 0, (30, 11))],
        [(second[7:8], 7, (30, 11)), (first[65:67], 65, (9, 2))],
        [(second[8:11], 8, (30, 11)), (first[67:68], 67, (9, 2))],
        [(second[11:], 11, (30, 11))],
    ]
    cpu, expected = KvCache(pair.config, BLOCKS), [pair.expected(first), pair.expected(second)]
    for step in steps:
        batch = a_batch(*step)
        ours = pair.network.forward(batch)
        assert_agree(ours, pair.on_cpu.forward(batch, cpu))
        wholes = [expected[0] if blocks == (9, 2) else expected[1] for _, _, blocks in step]
        parts = [whole[at : at + len(new)] for whole, (new, at, _) in zip(wholes, step, strict=True)]
        assert_agree(ours, torch.cat(parts))


@pytest.mark.parametrize("kind", OTHERS)
def test_the_parts_of_other_families_give_the_logits_of_transformers(
    tmp_path: Path, device: torch.device, kind: str
) -> None:
    pair = a_checkpoint(tmp_path, kind, device)
    tokens = some_tokens(9)
    chunk = pair.network.forward(a_batch((tokens[:8], 0, (3,))))
    single = pair.network.forward(a_batch((tokens[8:], 8, (3,))))
    assert_agree(torch.cat((chunk, single)), pair.expected(tokens))


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("qwen3", "fp8, blocks"),
        ("qwen3", "compressed-tensors, int8 W8A8"),
        ("qwen3", "gptq, by activation, with zeros"),
        ("qwen3 moe", "fp8, blocks"),
        ("qwen3 moe", "awq"),
        ("qwen3 moe", "gptq, by activation, with zeros"),
    ],
)
def test_quantised_matrices_are_multiplied_as_they_are_stored(
    tmp_path: Path, device: torch.device, kind: str, scheme: str
) -> None:
    save_quantised(tmp_path, kind, scheme)
    stored, tokens = tmp_path / "quantised", some_tokens(9)
    config = read_config(stored)
    plain = moved(load_weights(tmp_path / "meant", config), config, device=device, dtype=torch.float32)
    weights = load_weights(stored, config, dtype="float32", is_for_gpu=True)
    packed = moved(weights, config, device=device, dtype=torch.float32)
    assert isinstance(packed.layers[0].query_key_value, PackedMatrix)
    assert packed.bytes_per_step < plain.bytes_per_step
    logits = []
    for each in (plain, packed):
        network = GpuNetwork.of(config, each)
        network.allocate(4)
        chunk = network.forward(a_batch((tokens[:8], 0, (3,)))).clone()
        logits.append(torch.cat((chunk, network.forward(a_batch((tokens[8:], 8, (3,)))))))
    assert_agree(logits[1], logits[0].cpu())


def test_queries_grow_as_on_the_cpu(tmp_path: Path, device: torch.device) -> None:
    save_checkpoint(tmp_path, "mistral3, growing queries")
    config = read_config(tmp_path)
    positions = torch.tensor([0, 63, 64, 200])
    grown, table = (
        RotaryEmbedding(config.rope, config.head_dim).at(positions, torch.float32),
        query_growth(config, device),
    )
    assert table is not None
    assert grown.query_scale is not None
    torch.testing.assert_close(table.cpu()[positions], grown.query_scale.flatten())


def test_long_chunks_take_dense_attention(tmp_path: Path, device: torch.device) -> None:
    pair = a_checkpoint(tmp_path, "llama", device, options=StepOptions(rows=4, dense_from_pairs=40), is_dense=True)
    prompt = some_tokens(12)
    short = some_tokens(3, seed=2)
    batch = a_batch((prompt[6:], 6, (3, 7)), (short, 0, (5,)), wanted=[5, 8])
    with skipped_where_dense_attention_has_no_float32():
        pair.network.forward(a_batch((prompt[:6], 0, (3, 7)), wanted=[]))
        ours = pair.network.forward(batch)
    assert_agree(ours, torch.stack([pair.expected(prompt)[-1], pair.expected(short)[-1]]))


def test_what_long_chunks_need_is_compiled_beforehand_and_changes_nothing_that_is_cached(
    tmp_path: Path, device: torch.device
) -> None:
    pair = a_checkpoint(tmp_path, "llama", device, options=StepOptions(rows=4, dense_from_pairs=9), is_dense=True)
    cache = pair.network.steps.cache.data.view(torch.uint8)
    before = cache.clone()
    with skipped_where_dense_attention_has_no_float32():
        pair.network.steps.warm_up_long()
    assert torch.equal(cache[:-1], before[:-1])
    assert not torch.equal(cache[-1], before[-1])


def test_every_attention_of_long_chunks_can_be_timed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cpu":
        monkeypatch.setattr(dense, "_NEW_TOKENS", 4)
        monkeypatch.setattr(dense, "_TIMED_PAGES", 3)
        monkeypatch.setattr(dense, "_TIMED_KV_HEADS", 1)
    for way in ("flash", None):
        timing = dense._timing_of(way, device, dtype, 32, 2)
        assert timing.again > 0
        assert timing.new > 0


def test_the_dense_attention_that_is_asked_for_is_right_or_none(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    assert dense_attention(device, dtype, 32) in ("flash", "cudnn", None)
    if device.type == "cpu":
        assert dense_attention(device, dtype, 32) == "flash"
        assert dense_attention(device, torch.float16, 32) is None


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_cache_errs_little(tmp_path: Path, device: torch.device, kv_dtype: torch.dtype) -> None:
    pair = a_checkpoint(tmp_path, "qwen3", device, kv_dtype=kv_dtype)
    prompt = some_tokens(8)
    pair.network.forward(a_batch((prompt[:7], 0, (3, 7)), wanted=[]))
    ours = pair.network.forward(a_batch((prompt[7:], 7, (3, 7))))
    assert_agree(ours, pair.expected(prompt)[-1:], tolerance=0.1 if kv_dtype == torch.int8 else 0.6)
    assert pair.network.block_bytes == 2 * 2 * 2 * 64 * (32 + 4)


def tokens_of(samples: Sequence[Sample | None]) -> list[int | None]:
    return [None if sample is None else sample.token_id for sample in samples]


def answer(pair: Checkpoint, prompts: list[list[int]], new: int, *, drawing: Drawing, ahead: int) -> Answers:
    """The tokens drawn after `prompts`, with `ahead` steps submitted before the first of them is collected."""
    steps = pair.network.steps
    drawn: Answers = [[] for _ in prompts]
    due = []
    for step in range(new):
        spans = []
        for row, prompt in enumerate(prompts):
            computed = len(prompt) + step - 1 if step else 0
            known = prompt if not step else (None if ahead else [drawn[row][-1] or 0])
            at = drawing._replace(seed=drawing.seed + row, position=len(prompt) + step)
            spans.append(Span(row, known, computed, [2 * row, 2 * row + 1], at))
        due.append(steps.submit(step_of_spans(spans)))
        if len(due) > ahead:
            for row, token in enumerate(tokens_of(steps.collect(due.pop(0)))):
                drawn[row].append(token)
    for ticket in due:
        for row, token in enumerate(tokens_of(steps.collect(ticket))):
            drawn[row].append(token)
    steps.check()
    return drawn


def test_running_ahead_changes_no_token(tmp_path: Path, device: torch.device) -> None:
    pair = a_checkpoint(tmp_path, "qwen3", device)
    prompts = [some_tokens(3 + row, seed=row) for row in range(2)]
    greedy = answer(pair, prompts, 3, drawing=Drawing(), ahead=1)
    for prompt, tokens in zip(prompts, greedy, strict=True):
        drawn = [token for token in tokens if token is not None]
        assert drawn == pair.expected(prompt + drawn).argmax(1)[len(prompt) - 1 : -1].tolist()
    warm = Drawing(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 2)
    assert answer(pair, prompts, 3, drawing=warm, ahead=1) == answer(pair, prompts, 3, drawing=warm, ahead=0)


def test_a_drawn_token_does_not_depend_on_its_neighbours(tmp_path: Path, device: torch.device) -> None:
    pair = a_checkpoint(tmp_path, "llama", device)
    prompts = [some_tokens(3 + row, seed=row) for row in range(2)]
    warm = Drawing(temperature=2.0, seed=7)
    together = answer(pair, prompts, 2, drawing=warm, ahead=1)
    assert answer(pair, prompts[:1], 2, drawing=warm, ahead=1) == together[:1]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_that_are_not_finite_give_no_token(tmp_path: Path, device: torch.device) -> None:
    pair = a_checkpoint(tmp_path, "llama", device)
    pair.network.decoder.weights.embedding[13] = torch.nan
    batch = a_batch(([12], 0, (1,)), ([13], 0, (2,)))
    samples = pair.network.collect(pair.network.submit(batch, [Drawing(), Drawing()]))
    tokens = tokens_of(samples)
    assert tokens[0] is not None
    assert tokens[1] is None
    assert pair.network.draw(pair.network.forward(batch), [Drawing(), Drawing()]) == samples
    with pytest.raises(ValueError, match="1 drawings for 2 rows"):
        pair.network.submit(batch, [Drawing()])
    with pytest.raises(ValueError, match="no ticket of a step"):
        pair.network.collect("nothing")


def test_a_step_beyond_the_room_of_its_buffers_gives_the_same(tmp_path: Path, device: torch.device) -> None:
    # two rows are a graph's, three are not
    pair = a_checkpoint(tmp_path, "llama", device, options=StepOptions(rows=4, graph_rows=2))
    prompts = [some_tokens(1, seed=row) for row in range(3)]
    ours = pair.network.forward(a_batch(*((prompt, 0, (row,)) for row, prompt in enumerate(prompts))))
    assert_agree(ours, torch.cat([pair.expected(prompt) for prompt in prompts]))


def test_warming_up_changes_no_block(tmp_path: Path, device: torch.device) -> None:
    pair = a_checkpoint(tmp_path, "llama", device)
    before = pair.network.steps.cache.data[:BLOCKS].clone()
    pair.network.steps.warm_up([1, 3])
    assert torch.equal(before.view(torch.int32), pair.network.steps.cache.data[:BLOCKS].view(torch.int32))


def test_the_engine_serves_it_as_any_network(tmp_path: Path, device: torch.device) -> None:
    pair = a_checkpoint(tmp_path, "qwen2", device)
    engine = Engine(Model("tiny", pair.network), EngineOptions(kv_blocks=BLOCKS, max_running=8))
    prompts = {key: some_tokens(5 + key, seed=key) for key in range(2)}
    drawn: dict[Any, list[int]] = {key: [] for key in prompts}
    for key, prompt in prompts.items():
        penalised = SamplingParams(ignore_eos=True, repetition_penalty=1.0 + key, presence_penalty=0.1 * key)
        engine.submit(Submission(key, len(prompt), 3, sampling=penalised))
        engine.extend(key, torch.tensor(prompt, dtype=torch.int32).numpy().tobytes())
    while engine.has_work:
        for each in engine.step().drawn:
            drawn[each.key] += each.token_ids
    assert drawn[0] == pair.expected(prompts[0] + drawn[0]).argmax(1)[4:-1].tolist()
    assert len(drawn[1]) == 3


def test_nothing_is_computed_before_memory_is_there(tmp_path: Path, device: torch.device) -> None:
    save_checkpoint(tmp_path, "llama")
    config = read_config(tmp_path)
    weights = moved(load_weights(tmp_path, config), config, device=device, dtype=torch.float32)
    network = GpuNetwork(GpuDecoder(config, weights))
    with pytest.raises(RuntimeError, match="no memory"):
        network.forward(a_batch(([1], 0, (0,))))
