"""Adapters on the GPU's decoder: each row has its own, at fixed addresses that graphs read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch
from shards.exec.drawing import Drawing
from shards.gpu.decoder import GpuDecoder
from shards.gpu.network import GpuNetwork
from shards.gpu.step import StepOptions
from shards.gpu.weights import moved
from shards.kernels.launch import Gpu, Launch
from shards.lora.options import AdapterOptions
from shards.model import Model, PagedNetwork
from shards.network.config import NetworkConfig, Rope
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.errors import UnsupportedCheckpoint
from shards.network.layers import Weights
from shards.network.loading import load_weights, random_weights
from shards.nouns import SamplingParams, Submission
from tests.shards.gpu.conftest import INTERPRETED
from tests.shards.lora.adapters import ATTENTION, logits_of, save_adapter
from tests.shards.lora.written import write_adapter
from tests.shards.tiny_checkpoints import a_batch, save_checkpoint, some_tokens

BLOCKS = 12
CONFIG = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 2, 1, 16, 512, 1e-6, Rope(), (None,) * 2)
# the interpreter multiplies the bits of bf16
TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters `a` of all matrices, `b` of some, with another rank, and `c` of queries, keys and values alone."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", CONFIG, rank=4, seed=1)
    write_adapter(folder / "b", CONFIG, rank=20, seed=2, matrices=("output", "down", "lm_head"))
    write_adapter(folder / "c", CONFIG, rank=16, seed=3, matrices=("query_key_value",))
    return folder


def the_weights(dtype: torch.dtype = torch.float32) -> Weights:
    return random_weights(CONFIG, 1, dtype=dtype)


def a_network(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> GpuNetwork:
    weights = moved(the_weights(dtype), CONFIG, device=device, dtype=dtype)
    return GpuNetwork(GpuDecoder(CONFIG, weights), options=StepOptions(**({"rows": 8} | options)))


def with_adapters(batch: Batch, *adapters: Any) -> Batch:
    """The same batch with an adapter, or None, for each row."""
    rows = (row._replace(adapter=adapter) for row, adapter in zip(batch.rows, adapters, strict=True))
    return replace(batch, rows=tuple(rows))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The kernels that are started, by name."""
    found: Counter[str] = Counter()
    start = Gpu.start

    def counting(gpu: Gpu, launch: Launch) -> None:
        found[launch.kernel.__name__] += 1
        start(gpu, launch)

    with mock.patch.object(Gpu, "start", counting):
        yield found


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_row_gets_the_logits_of_its_adapter_on_a_cpu(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    ours, theirs = a_network(device, dtype), PagedNetwork(Decoder(CONFIG, the_weights(dtype)), kv_dtype=dtype)
    found: list[list[Any]] = []
    for network in (ours, theirs):
        _, form = network.adapt(AdapterOptions(most_rank=20))
        found.append([None, *(form.read(folder / name, name) for name in "abc")])
        network.allocate(BLOCKS)
    long, short, third = some_tokens(70), some_tokens(5, seed=1), some_tokens(9, seed=2)
    steps: list[tuple[list[tuple[list[int], int, tuple[int, ...]]], list[int], list[int] | None]] = [
        # prompts beside each other, a prompt beside decoding rows in another order, with few logits and with all
        ([(long[:65], 0, (0, 1)), (short[:3], 0, (2,)), (third[:2], 0, (3,))], [1, 0, 2], [64, 66, 67, 69]),
        ([(long[65:68], 65, (0, 1)), (short[3:4], 3, (2,)), (third[2:3], 2, (3,))], [1, 0, 2], None),
        # decoding: several adapters with a row of none, one adapter for all, and none at all
        ([(long[68:69], 68, (0, 1)), (short[4:], 4, (2,)), (third[3:4], 3, (3,)), ([5], 0, (4,))], [1, 0, 2, 3], None),
        ([(third[4:5], 4, (3,)), (long[69:], 69, (0, 1))], [2, 2], None),
        ([(third[5:6], 5, (3,)), ([6], 1, (4,))], [0, 0], None),
        ([(third[6:7], 6, (3,)), ([7], 2, (4,))], [3, 1], None),
    ]
    moved_by = 0.0
    for rows, chosen, wanted in steps:
        batch = a_batch(*rows, wanted=wanted)
        logits = []
        for network, adapters in zip((ours, theirs), found, strict=True):
            adapted = network.forward(with_adapters(batch, *(adapters[number] for number in chosen)))
            logits.append(adapted.float().cpu().clone())
        torch.testing.assert_close(logits[0], logits[1], atol=TOLERANCE[dtype], rtol=0)
        # without its adapters, computed again in the same places
        moved_by = max(moved_by, float((theirs.forward(batch).float() - logits[1]).abs().max()))
        theirs.forward(with_adapters(batch, *(found[1][number] for number in chosen)))
    assert moved_by > 1
    ours.steps.check()


@pytest.mark.parametrize("kind", ["llama", "phi3", "glm4 moe"])
def test_logits_are_those_of_peft(tmp_path: Path, device: torch.device, kind: str) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    modules = ATTENTION if kind == "glm4 moe" else r".*(q_proj|k_proj|v_proj|qkv_proj|o_proj|gate_up_proj|down_proj)"
    theirs = save_adapter(save_checkpoint(tmp_path / "base", kind), tmp_path / "a", modules=modules)
    config = read_config(tmp_path / "base")
    weights = moved(load_weights(tmp_path / "base", config), config, device=device, dtype=torch.float32)
    network = GpuNetwork(GpuDecoder(config, weights), options=StepOptions(rows=8))
    _, form = network.adapt(AdapterOptions())
    network.allocate(BLOCKS)
    adapter, tokens = form.read(tmp_path / "a", "a"), some_tokens(9)
    chunks = a_batch((tokens[:8], 0, (3,)), (tokens[:4], 0, (4,)))
    found = [network.forward(with_adapters(chunks, adapter, None)).cpu()]
    single = a_batch((tokens[4:5], 4, (4,)), (tokens[8:], 8, (3,)))
    found.append(network.forward(with_adapters(single, None, adapter)).cpu())
    tuned = logits_of(theirs, tokens)
    with theirs.disable_adapter():
        own = logits_of(theirs, tokens)
    assert (tuned - own).abs().max() > 0.5
    expected = [torch.cat([tuned[:8], own[:4]]), torch.stack([own[4], tuned[8]])]
    torch.testing.assert_close(found[0], expected[0], atol=3e-4, rtol=0)
    torch.testing.assert_close(found[1], expected[1], atol=3e-4, rtol=0)


class AtOnce(Executor):
    """Runs everything on the caller's thread."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args, **kwargs))
        return done


def answers(model: Model, folder: Path, asked: Sequence[tuple[str, int]], **options: Any) -> dict[int, list[int]]:
    """The greedy answers of requests, each of an adapter's name and the seed of its prompt."""
    adapters = AdapterOptions(folder=folder, most=2, most_rank=20, most_bytes=2**27)
    engine = Engine(model, EngineOptions(kv_blocks=16, max_running=4, adapters=adapters, **options))
    drawn: dict[int, list[int]] = {key: [] for key in range(len(asked))}
    for key, (name, seed) in enumerate(asked):
        prompt = some_tokens(3 + key, seed=seed)
        engine.submit(Submission(key, len(prompt), 3, sampling=SamplingParams(ignore_eos=True), adapter=name))
        engine.extend(key, torch.tensor(prompt, dtype=torch.int32).numpy().tobytes())
    ended: list[Any] = []
    while len(ended) < len(asked):
        report = engine.step()
        ended += report.finished
        for each in report.drawn:
            drawn[int(str(each.key))] += each.token_ids
        engine.check()
    engine.close()
    return drawn


def test_an_engine_answers_as_on_a_cpu_with_graphs_and_without(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the stand-in for a GPU is there for one thread alone
    monkeypatch.setattr("shards.lora.shelf.ThreadPoolExecutor", AtOnce)
    # three adapters for two slots: the last one waits until another one is not used any more
    asked = [("a", 1), ("", 1), ("b", 2), ("c", 2), ("a", 3)]
    cpu = PagedNetwork(Decoder(CONFIG, the_weights()), kv_dtype=torch.float32)
    expected = answers(Model("tiny", cpu), folder, asked)
    assert len({tuple(tokens) for tokens in expected.values()}) > 3
    for graphs in (True, False):
        network = a_network(device, graphs=graphs)
        assert answers(Model("tiny", network), folder, asked) == expected
        network.steps.check()


def test_a_step_without_adapters_has_no_launch_for_them(folder: Path, device: torch.device) -> None:
    plain, network = (a_network(device, graphs=False) for _ in range(2))
    _, form = network.adapt(AdapterOptions(most_rank=20))
    a = form.read(folder / "a", "a")
    for each in (plain, network):
        each.allocate(BLOCKS)
    for rows in ([([1, 2, 3], 0, (0,)), ([4], 0, (1,))], [([4], 3, (0,)), ([5], 1, (1,))]):
        batch = a_batch(*rows)
        launches = []
        for each, adapters in ((plain, (None, None)), (network, (None, None)), (network, (None, a))):
            with counted() as found:
                each.collect(each.submit(with_adapters(batch, *adapters), [Drawing()] * len(batch.logit_rows)))
            launches.append(found)
        assert launches[1] == launches[0]
        # four matrices of two layers, and the head
        assert launches[2] - launches[0] == {"_shrink": 9, "_expand": 9}


def test_more_adapters_than_slots_in_one_step_are_refused(folder: Path, device: torch.device) -> None:
    network = a_network(device)
    options, form = network.adapt(AdapterOptions(most=2, most_rank=20))
    network.allocate(BLOCKS)
    assert options.most == 2
    batch = a_batch(*(([1], 0, (row,)) for row in range(3)))
    adapters = [form.read(folder / name, name) for name in "abc"]
    with pytest.raises(ValueError, match="a step has 3 adapters, and there are slots for 2"):
        network.forward(with_adapters(batch, *adapters))


def test_a_slot_has_the_adapter_that_was_used_last(folder: Path, device: torch.device) -> None:
    logits = {}
    for most in (3, 1):
        network = a_network(device)
        _, form = network.adapt(AdapterOptions(most=most, most_rank=20))
        network.allocate(BLOCKS)
        adapters = {name: form.read(folder / name, name) for name in "abc"}
        # with one slot each step overwrites the adapter of the step before, which may still run
        found = [network.forward(with_adapters(a_batch(([7], 0, (1,))), adapters[name])).clone() for name in "abcab"]
        logits[most] = torch.cat(found).cpu()
    assert torch.equal(logits[3], logits[1])
    assert torch.equal(logits[3][:2], logits[3][3:])


def test_an_adapter_with_a_larger_rank_than_slots_have_is_refused(folder: Path, device: torch.device) -> None:
    _, form = a_network(device).adapt(AdapterOptions(most_rank=16))
    for look in (form.size, lambda at: form.read(at, "b")):
        with pytest.raises(
            UnsupportedCheckpoint, match="has rank 20, and adapters on this GPU have at most 16"
        ) as error:
            look(folder / "b")
        assert "raise --max-lora-rank to 20" in str(error.value)


def test_memory_bounds_the_slots(device: torch.device) -> None:
    network = a_network(device)
    one, _ = network.adapt(AdapterOptions(most=8))
    assert one.most == 8
    slots = network.decoder.slots
    assert slots is not None
    each = slots.nbytes // 8
    # the same slots if asked again
    network.adapt(AdapterOptions(most=8))
    assert network.decoder.slots is slots
    options, form = a_network(device).adapt(AdapterOptions(most=8, most_bytes=3 * each))
    assert options.most == 3
    with pytest.raises(ValueError, match="raise --lora-memory, or lower --max-lora-rank"):
        a_network(device).adapt(AdapterOptions(most_bytes=each - 1))
    assert repr(slots).startswith("AdapterMemory(0 of 8 used")
    assert repr(form).startswith("PackedFormat(SlotLayout(9 matrices, ranks up to 16")


def test_steps_with_adapters_are_prepared_too(folder: Path, device: torch.device) -> None:
    # short contexts, as the longest chunk takes its time
    config = replace(CONFIG, max_positions=32)
    weights = moved(the_weights(), config, device=device, dtype=torch.float32)
    network = GpuNetwork(GpuDecoder(config, weights), options=StepOptions(rows=2))
    _, form = network.adapt(AdapterOptions(most_rank=20))
    network.allocate(BLOCKS)
    network.prepare(2)
    steps = network.steps
    if device.type == "cuda":
        assert steps._decoding_adapted.captured == steps._decoding.captured == (1, 2)
    a = form.read(folder / "a", "a")
    drawn = network.collect(network.submit(with_adapters(a_batch(([7], 0, (1,))), a), [Drawing()]))
    expected = network.forward(with_adapters(a_batch(([7], 0, (2,))), a))
    assert [sample and sample.token_id for sample in drawn] == expected.argmax(1).tolist()
