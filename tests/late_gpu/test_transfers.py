"""Transfers, copies beside the computation and graphs of the GPU step, on a device that is late."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shards.__main__ import kv_bytes
from shards.exec.drawing import Adjustment, Drawing, Sample, SlotState
from shards.gpu.adapters import PackedAdapter
from shards.gpu.cache import MOST_SHARE, GpuCache, working_bytes
from shards.gpu.decoder import GpuDecoder
from shards.gpu.host import PinnedMemory
from shards.gpu.network import GpuNetwork
from shards.gpu.spans import Span, Step, step_of_spans
from shards.gpu.step import StepOptions
from shards.gpu.transfers import TURNS, Inbound, Outbound
from shards.gpu.weights import moved
from shards.kernels.logprobs import LOGPROB_WORDS
from shards.kernels.sampling import DrawnRows
from shards.kv.copier import BlockCopy
from shards.lora.options import AdapterOptions
from shards.model import Model
from shards.network.config import NetworkConfig, Rope
from shards.network.loading import random_weights
from shards.nouns import TokenLogprobs
from shards.options import EngineOptions
from tests.late_gpu.device import LateGpu
from tests.shards.lora.written import write_adapter
from tests.shards.tiny_checkpoints import a_batch, some_tokens

GPU = torch.device("cuda")
CONFIG = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 2, 1, 16, 512, 1e-6, Rope(), (None,))


@pytest.fixture
def network() -> GpuNetwork:
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=GPU, dtype=torch.float32)
    network = GpuNetwork(GpuDecoder(CONFIG, weights), options=StepOptions(rows=4, graph_tokens=64))
    network.allocate(8)
    return network


def test_a_buffer_is_filled_again_only_once_it_was_copied() -> None:
    outbound = Outbound(GPU)
    sent = [outbound.send(outbound.next(4).fill_(number)) for number in range(2 * TURNS)]
    assert [copy.tolist() for copy in sent] == [[number] * 4 for number in range(2 * TURNS)]


def test_tokens_are_read_once_they_have_arrived() -> None:
    inbound, tickets = Inbound(GPU, 2), []
    logprobs = torch.zeros(1, LOGPROB_WORDS, dtype=torch.int32, device=GPU)
    for token in range(TURNS):
        tickets.append(inbound.next([Drawing(top_logprobs=0)]))
        tokens = torch.tensor([[token], [1]], dtype=torch.int32, device=GPU)
        inbound.put(tickets[-1], DrawnRows(tokens, logprobs))
    expected = [[Sample(token, TokenLogprobs(0.0, ()))] for token in range(TURNS)]
    assert [inbound.take(ticket) for ticket in tickets] == expected


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "polling"])
def test_blocks_come_back_as_they_were_computed(network: GpuNetwork, waits: bool) -> None:
    cache = network.steps.cache
    memory = network.host_memory(2)
    copier = memory.copier()

    def copied(*copies: BlockCopy) -> None:
        ticket = copier.start(copies)
        if waits:
            copier.wait(ticket)
        while not copier.done(ticket):
            pass

    network.forward(a_batch((some_tokens(60), 0, (3,)), wanted=[]))
    copied(BlockCopy(3, 1, is_save=True))
    host = [plane[1].clone() for plane in memory._host]
    assert not torch.isnan(host[0][:, :, :, :60]).any(), "NaN in the host's blocks"
    copied(BlockCopy(5, 1, is_save=False))
    for plane, kept in zip(cache.planes, host, strict=True):
        assert torch.equal(plane[5].cpu().nan_to_num(), kept.nan_to_num()), "blocks that come back differ"
    copier.close()


def tokens_in(samples: list[Sample | None]) -> list[int | None]:
    return [None if sample is None else sample.token_id for sample in samples]


def tokens_of(network: GpuNetwork, new: int, blocks: tuple[int, int]) -> list[int | None]:
    """The tokens drawn greedily after a prompt of three."""
    steps, prompt, drawn = network.steps, some_tokens(3), []
    for step in range(new):
        known = prompt if not step else [drawn[-1] or 0]
        computed = len(prompt) + step - 1 if step else 0
        span = Span(0, known, computed, list(blocks), Drawing())
        drawn += tokens_in(steps.collect(steps.submit(step_of_spans([span]))))
    return drawn


def test_graphs_read_what_each_step_sends(network: GpuNetwork, caplog: pytest.LogCaptureFixture) -> None:
    whole = some_tokens(7)
    # a prompt that is computed at once has neither graphs nor buffers at fixed addresses
    afresh = network.forward(a_batch((whole, 0, (4, 5)))).cpu()
    # the second time the same graph, with other blocks
    for blocks in ((1, 2), (6, 3)):
        network.forward(a_batch((whole[:3], 0, blocks), wanted=[]))
        for computed in range(3, 7):
            logits = network.forward(a_batch((whole[computed : computed + 1], computed, blocks))).cpu()
            torch.testing.assert_close(logits[0], afresh[computed], atol=1e-4, rtol=1e-4)
    assert network.steps._decoding.captured == (1,), caplog.text


def test_graphs_draw_the_tokens_of_a_prompt_that_is_computed_at_once(network: GpuNetwork) -> None:
    for blocks in ((1, 2), (6, 3)):
        drawn = [token or 0 for token in tokens_of(network, 4, blocks)]
        assert len(set(drawn)) > 1
        afresh = network.forward(a_batch((some_tokens(3) + drawn, 0, (4, 5)))).cpu()
        assert drawn == afresh[2:-1].argmax(1).tolist()
    assert network.steps._drawing.captured == (1,)


def test_every_bucket_is_captured_and_gives_what_running_directly_gives(network: GpuNetwork) -> None:
    network.prepare(2)
    assert network.steps._drawing.captured == (1, 2)
    eager = GpuNetwork(network.decoder, options=StepOptions(rows=4, graphs=False))
    eager.allocate(8)
    answers: list[list[list[int | None]]] = []
    for each in (network, eager):
        drawn = []
        for rows in (2, 1, 2):
            spans = [Span(row, [row + 1], 0, [row], Drawing()) for row in range(rows)]
            drawn.append(tokens_in(each.steps.collect(each.steps.submit(step_of_spans(spans)))))
        answers.append(drawn)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_decoder_computes_in_every_type(dtype: torch.dtype, network: GpuNetwork) -> None:
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=GPU, dtype=dtype)
    narrow = GpuNetwork(GpuDecoder(CONFIG, weights, dense="flash"), options=StepOptions(rows=4, dense_from_pairs=700))
    narrow.allocate(8)
    prompt = some_tokens(74)
    outcomes = []
    for each in (network, narrow):
        whole = each.forward(a_batch((prompt[:70], 0, (1, 2)))).cpu()
        behind = each.forward(a_batch((prompt[70:73], 70, (1, 2)))).cpu()
        outcomes.append(torch.cat([whole, behind, each.forward(a_batch((prompt[73:], 73, (1, 2)))).cpu()]))
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(outcomes[1], outcomes[0], atol=tolerance, rtol=tolerance)


def test_the_host_memory_of_a_cache_is_page_locked() -> None:
    cache = GpuCache(CONFIG, 2, dtype=torch.float32, device=GPU)
    memory = PinnedMemory(cache, 2, device=GPU)
    assert LateGpu.present is not None
    assert all(LateGpu.present.is_pinned(plane[1]) for plane in memory._host)


@pytest.mark.parametrize("dense", [None, "flash"])
@pytest.mark.parametrize(("tokens", "rows"), [(40, 3), (3, 8)])
def test_the_room_for_kv_is_what_the_largest_step_leaves(dense: str | None, tokens: int, rows: int) -> None:
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=GPU, dtype=torch.bfloat16)
    # numbers of 512 tokens at fixed addresses would be much beside such a small step
    options = StepOptions(rows=8, graph_tokens=64, dense_from_pairs=1)
    network = GpuNetwork(GpuDecoder(CONFIG, weights, dense=dense), options=options)
    gc.collect()
    free, _ = torch.cuda.mem_get_info()
    room = network.room_bytes(batch_tokens=tokens, rows=rows)
    working = int(free * MOST_SHARE) - room
    before = torch.cuda.memory_allocated()
    network.allocate(0)
    fixed = torch.cuda.memory_allocated() - before
    # what the shapes give is an upper bound, beside buffers at fixed addresses and the numbers that the host sends
    expected, sent = working_bytes(CONFIG, batch_tokens=tokens, rows=rows, dtype=torch.bfloat16), 1024
    assert fixed < working <= fixed + expected + sent
    network.allocate(4)
    assert network.submit(a_batch(([1], 0, (3,))), [Drawing()])


def test_no_kernel_is_compiled_after_the_warm_up(network: GpuNetwork) -> None:
    gpu = LateGpu.present
    assert gpu is not None
    network.prepare(2)
    # as the engine does: a prompt of one block and a token, and a token behind it
    network.forward(a_batch((some_tokens(65), 0, (1, 2))))
    warm = set(gpu.variants)
    for prompt, computed in ((some_tokens(3), 0), (some_tokens(64), 64), (some_tokens(17), 200)):
        network.forward(a_batch((prompt, computed, (1, 2, 3, 4)), ([5], 90, (6, 7))))
    for context in (0, 15, 63, 128, 300):
        network.forward(a_batch(([5], context, (0, 1, 2, 3, 4))))
    assert gpu.variants - warm == set()


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[GpuNetwork, PackedAdapter]:
    """A network with an adapter for its rows."""
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=GPU, dtype=torch.float32)
    network = GpuNetwork(GpuDecoder(CONFIG, weights), options=StepOptions(rows=4, graph_tokens=64))
    _, form = network.adapt(AdapterOptions())
    network.allocate(8)
    return network, form.read(write_adapter(tmp_path / "a", CONFIG, rank=4, seed=1), "a")


def test_no_kernel_is_compiled_for_adapters_after_the_warm_up(adapted: tuple[GpuNetwork, PackedAdapter]) -> None:
    network, adapter = adapted
    gpu = LateGpu.present
    assert gpu is not None
    network.prepare(2)
    network.forward(a_batch((some_tokens(65), 0, (1, 2))))
    warm = set(gpu.variants)
    for tokens in (3, 64, 300):
        batch = a_batch((some_tokens(tokens), 0, (1, 2, 3, 4, 5)), ([5], 90, (6, 7)), wanted=[tokens - 1, tokens])
        rows = (batch.rows[0]._replace(adapter=adapter), batch.rows[1])
        network.submit(replace(batch, rows=rows), [Drawing()] * 2)
    network.steps.collect(network.steps._inbound._due[0][0])
    assert gpu.variants - warm == set()


def test_a_decoding_step_with_adapters_is_two_launches_too(adapted: tuple[GpuNetwork, PackedAdapter]) -> None:
    network, adapter = adapted
    gpu = LateGpu.present
    assert gpu is not None
    launches = []
    for context in range(3):
        batch = a_batch(([7], context, (1,)))
        before = gpu.launches.copy()
        network.collect(network.submit(replace(batch, rows=(batch.rows[0]._replace(adapter=adapter),)), [Drawing()]))
        launches.append(gpu.launches - before)
    # the first one loads the adapter and captures the graph
    assert launches[1] == launches[2] == {"graph": 2, "aten::copy_": 3}


def test_the_room_for_kv_is_what_adapters_leave(tmp_path: Path) -> None:
    rooms = []
    for most in (0, 8):
        weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=GPU, dtype=torch.bfloat16)
        network = GpuNetwork(GpuDecoder(CONFIG, weights), options=StepOptions(rows=8))
        adapters = AdapterOptions({"a": tmp_path}, most=most) if most else AdapterOptions()
        options = EngineOptions(batch_tokens=40, max_running=3, adapters=adapters)
        gc.collect()
        rooms.append(kv_bytes(Model("m", network), None, options, gpu_shards=1))
    assert network.decoder.slots is not None
    assert rooms[0] - rooms[1] >= network.decoder.slots.nbytes * MOST_SHARE - 4096


def a_mixed_step(at: int, chunk: int) -> Step:
    """A sequence that decodes, and a chunk of another one behind `at` tokens."""
    decoding = Span(0, [7], 4 + at, [1, 2], Drawing())
    return step_of_spans([Span(1, some_tokens(chunk), at, [3, 4, 5], Drawing()), decoding])


def test_a_step_with_a_chunk_is_two_launches_and_what_moves_its_numbers(network: GpuNetwork) -> None:
    gpu = LateGpu.present
    assert gpu is not None
    network.prepare(2)
    tokens_of(network, 2, (1, 2))
    before = gpu.launches.copy()
    network.steps.collect(network.steps.submit(a_mixed_step(0, 20)))
    assert gpu.launches - before == {"graph": 2, "aten::copy_": 3}


def test_a_graph_with_chunks_reads_what_each_step_sends(network: GpuNetwork) -> None:
    network.prepare(2)
    eager = GpuNetwork(network.decoder, options=StepOptions(rows=4, graphs=False))
    eager.allocate(8)
    for at, chunk in ((0, 30), (30, 5), (35, 60), (95, 2)):
        drawn = []
        for each in (network, eager):
            if not at:
                tokens_of(each, 2, (1, 2))
            drawn.append(tokens_in(each.steps.collect(each.steps.submit(a_mixed_step(at, chunk)))))
        assert drawn[0] == drawn[1]
    assert len(set(network.steps._mixed.captured)) == 1


def test_all_graphs_are_captured_before_the_first_request(network: GpuNetwork) -> None:
    gpu = LateGpu.present
    assert gpu is not None
    before = len(gpu.recordings)
    network.prepare(3)
    # 1, 2 and 4 decoding rows and their draws, with top-p and without, and 64 tokens with chunks
    assert len(gpu.recordings) - before == 10
    tokens_of(network, 2, (1, 2))
    for drawing in (Drawing(temperature=1.0), Drawing(temperature=1.0, top_p=0.9)):
        network.steps.collect(network.steps.submit(step_of_spans([Span(0, [7], 4, [1, 2], drawing)])))
    # one chunk fits into no graph
    for at, chunk in ((0, 30), (30, 70), (100, 2)):
        network.steps.collect(network.steps.submit(a_mixed_step(at, chunk)))
    network.forward(a_batch((some_tokens(3), 0, (6,))))
    assert len(gpu.recordings) - before == 10


def test_graphs_of_all_sizes_take_the_memory_of_the_largest() -> None:
    gpu = LateGpu.present
    assert gpu is not None
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=GPU, dtype=torch.float32)
    network = GpuNetwork(GpuDecoder(CONFIG, weights), options=StepOptions(rows=2, graph_tokens=128))
    network.allocate(2)
    gc.collect()
    before = gpu.most_allocated = gpu.allocated
    network.steps.warm_up_mixed(2)
    assert len(network.steps._mixed.captured) == 2
    gc.collect()
    # what stays are the draws of two rows, with top-p and without
    assert gpu.allocated - before <= 2 * 2 * 4 * (2 + LOGPROB_WORDS)
    assert gpu.most_allocated - before <= working_bytes(CONFIG, batch_tokens=128, rows=2, dtype=torch.float32)


def test_a_decoding_step_is_two_launches_and_what_moves_its_numbers(network: GpuNetwork) -> None:
    gpu = LateGpu.present
    assert gpu is not None
    tokens_of(network, 2, (1, 2))
    before = gpu.launches.copy()
    span = Span(0, [7], 4, [1, 2], Drawing())
    network.steps.collect(network.steps.submit(step_of_spans([span])))
    # one graph computes and one draws; the step's numbers, its tables, and the drawn token are moved
    assert gpu.launches - before == {"graph": 2, "aten::copy_": 3}


PENALISED = Adjustment(1, 1.3, 0.5, 0.2, begins=SlotState(prompt=b"\1\0\0\0", bias=((7, 3.0),)))


def test_a_row_that_changes_its_logits_costs_no_launch_and_its_logprobs_one_copy(network: GpuNetwork) -> None:
    gpu = LateGpu.present
    assert gpu is not None
    network.reserve(2)
    network.prepare(1)
    tokens_of(network, 2, (1, 2))
    warm = set(gpu.variants)
    span = Span(0, [7], 4, [1, 2], Drawing(adjustment=PENALISED))
    first = network.steps.collect(network.steps.submit(step_of_spans([span])))[0]
    before = gpu.launches.copy()
    later = Drawing(top_logprobs=3, adjustment=PENALISED._replace(begins=None))
    span = Span(0, [7], 4, [1, 2], later)
    second = network.steps.collect(network.steps.submit(step_of_spans([span])))[0]
    assert gpu.launches - before == {"graph": 2, "aten::copy_": 4}
    assert network.steps._drawing.captured == network.steps._decoding.captured == (1,)
    assert gpu.variants - warm == set()
    assert first is not None
    assert second is not None
    assert second.logprobs is not None
    # counted by then, unless it is far ahead
    entry = network.steps._draws._entries[1, first.token_id].item()
    assert entry >> 12 == 1 + (second.token_id == first.token_id)


def test_a_step_is_computed_before_its_masks_are_there_and_draws_by_them(network: GpuNetwork) -> None:
    steps, only = network.steps, [0b100] + [0] * 12
    plain = Span(1, [5], 0, [3], Drawing())
    free = tokens_in(steps.collect(steps.submit(step_of_spans([Span(0, [7], 0, [1], Drawing()), plain]))))
    held = Span(0, [7], 0, [1], Drawing(is_masked=True, top_logprobs=1))
    ticket = steps.submit(step_of_spans([held, plain]))
    with pytest.raises(ValueError, match="step 1 is not the one that is due"):
        steps.collect(ticket)
    with pytest.raises(RuntimeError, match="step 1 still waits for its masks"):
        steps.submit(step_of_spans([plain]))
    with pytest.raises(ValueError, match="step 1 does not wait for 2 masks"):
        steps.mask(ticket, [bytes(13)] * 2)
    steps.mask(ticket, [bytes(only)])
    masked, other = steps.collect(ticket)
    assert masked is not None
    assert masked.token_id == 2
    assert masked.logprobs is not None
    # of the logits as they came
    assert masked.logprobs.top[0][0] == free[0]
    assert tokens_in([other]) == free[1:]
    ticket = steps.submit(step_of_spans([held]))
    steps.mask(ticket, [bytes(13)])
    assert steps.collect(ticket) == [None]
