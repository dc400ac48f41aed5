"""Processes of one shard: they answer as one process does, and end together. Each start loads torch twice: 5 s."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shards.draft_model import DraftModel
from shards.engine import Engine, EngineOptions
from shards.exec.network import DeviceLost
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from shards.parallel.processes import PartProcesses, gpus, leading
from shards.sched.cost import CostModel
from tests.shards.driver import Clock, packed
from tests.shards.programs import address_of, answers_at, begun, serving
from tests.shards.quantised_checkpoints import save_quantised
from tests.shards.tiny_checkpoints import save_checkpoint, some_tokens

PROMPTS = [some_tokens(70 + 11 * number, seed=number // 2) for number in range(8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_checkpoint(folder, "qwen3 moe")
    return folder


@pytest.fixture
def processes(checkpoint, monkeypatch) -> Iterator[PartProcesses]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    others = PartProcesses(str(checkpoint), size=2, dtype="auto", kv_dtype="auto", device="cpu", threads=1)
    yield others
    others.close()


def answers(model: Model, *, host_blocks: int) -> dict[int, list[int]]:
    """Greedy answers in a pool that is too small for all: sequences are preempted, parked on the host and resumed."""
    block_bytes = model.network.block_bytes
    engine = Engine(model, EngineOptions(kv_blocks=9, host_bytes=host_blocks * block_bytes, max_running=3))
    drawn: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(ignore_eos=True)
        engine.submit(Submission(number, len(prompt), 40, rank=number % 3, preemptible=True, sampling=sampling))
        engine.extend(number, packed(prompt))
        for each in engine.step().drawn:
            drawn[each.key] += each.token_ids
    while engine.has_work:
        for each in engine.step().drawn:
            drawn[each.key] += each.token_ids
    engine.check()
    engine.close()
    return drawn


def test_two_processes_answer_as_one(checkpoint, processes):
    part = Model.load(checkpoint, group=processes.group)
    processes.await_loaded(part.files)
    together = leading(part, processes)
    alone = Model.load(checkpoint)
    assert together.network.block_bytes == alone.network.block_bytes // 2
    expected = answers(alone, host_blocks=6)
    assert all(len(tokens) == 40 for tokens in expected.values())
    assert answers(together, host_blocks=6) == expected


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "sampled"])
def test_a_draft_model_in_the_first_process_changes_no_answer_of_two(sampling, checkpoint, processes):
    part = Model.load(checkpoint, group=processes.group)
    processes.await_loaded(part.files)
    drafted, expected = (
        guessed_answers(model, checkpoint, sampling) for model in (leading(part, processes), Model.load(checkpoint))
    )
    assert drafted == expected


def guessed_answers(model: Model, small: Path, sampling: dict[str, Any]) -> tuple[dict[int, list[int]], bool]:
    """The answers of `model` with drafts of the model in `small`, and whether most of these were right."""
    drafts = DraftModel(Model.load(small), 2**22, clock=Clock())
    # a tenth of what the engine supposes of the large one, as no time passes
    drafts._cost = CostModel(prior=(2e-4, 1e-5, 1e-10, 1e-9))
    engine = Engine(model, EngineOptions(kv_blocks=16), clock=Clock(), draft_model=drafts)
    drawn: dict[int, list[int]] = {number: [] for number in range(3)}
    for number in drawn:
        options = SamplingParams(ignore_eos=True, **sampling)
        engine.submit(Submission(number, len(PROMPTS[number]), 40, sampling=options))
        engine.extend(number, packed(PROMPTS[number]))
    while engine.has_work:
        report = engine.step()
        engine.check()
        for each in report.drawn:
            drawn[each.key] += each.token_ids
    engine.close()
    return drawn, report.load.model_accepted_tokens > 0.8 * report.load.model_drafted_tokens > 30


def test_an_engine_ends_once_another_process_has(checkpoint, processes):
    part = Model.load(checkpoint, group=processes.group)
    processes.await_loaded(part.files)
    engine = Engine(leading(part, processes), EngineOptions(kv_blocks=9))
    ended = []
    engine.wake = lambda: ended.append("woken")
    os.kill(processes.pids[0], signal.SIGKILL)
    processes._watching.join(0.0)
    engine.submit(Submission("a", 3, 5))
    engine.extend("a", packed([1, 2, 3]))
    with pytest.raises(DeviceLost, match=r"part 1 of this shard ended with status -9|has ended|peer"):
        # either the watch noticed first, or the step that needs the other process
        run(engine)
    engine.close()


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# two starts of two processes
@pytest.mark.timeout(180)
async def test_the_program_answers_as_one_process_does_with_whole_and_divided_experts_and_drafts(tmp_path):
    save_quantised(tmp_path, "qwen3 moe", "fp8, blocks")
    stored = tmp_path / "quantised"
    expected = answers(Model.load(stored, dtype="float32"), host_blocks=0)
    common = ("--tensor-parallel", "2", "--dtype", "float32")
    for options in (("--draft-model", str(stored)), ("--experts", "divided")):
        with serving(stored, *common, *options) as address:
            assert await answers_at(address, PROMPTS[:3], 40) == [expected[number] for number in range(3)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("victim", ["another", "the first"])
def test_an_idle_shard_ends_with_any_of_its_processes(checkpoint, victim):
    shard = begun(checkpoint, "--tensor-parallel", "2")
    assert shard.stderr is not None
    address_of(shard)
    (other,) = children(shard.pid)
    os.kill(other if victim == "another" else shard.pid, signal.SIGKILL)
    with shard.stderr:
        # both processes have it, so its end is that of both
        said = shard.stderr.read()
    if victim == "another":
        assert "part 1 of this shard ended with status -9" in said
    assert shard.wait(20) == (1 if victim == "another" else -9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tensor-parallel", "3"], "4 attention heads with 2 KV heads cannot be divided among 3 processes"),
        (["--tensor-parallel", "2", "--kv-dir", "/tmp/none"], "--kv-dir needs the whole KV of a block in one process"),
        (["--tensor-parallel", "2", "--kv-listen", "127.0.0.1:0"], "--kv-listen needs the whole KV of a block"),
        (["--tensor-parallel", "2", "--lora-dir", "/tmp"], "LoRA adapters are not divided: leave out --lora"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_a_sentence(checkpoint, options, sentence):
    shard = begun(checkpoint, *options)
    _, said = shard.communicate(timeout=60)
    assert shard.returncode == 1
    assert sentence in said
    assert "Traceback" not in said


def test_more_processes_than_gpus_are_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 3")
    assert gpus(2) == ["GPU-a", "3"]
    with pytest.raises(ValueError, match="--tensor-parallel is 4, and 2 GPUs are visible"):
        gpus(4)


def test_a_checkpoint_that_cannot_be_loaded_is_the_error_of_the_process_that_could_not(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    others = PartProcesses(
        str(tmp_path), size=2, dtype="auto", kv_dtype="auto", device="cpu", threads=1, abort=lambda _: None
    )
    with pytest.raises(ValueError, match=r"part 1 cannot be loaded: config\.json names neither"):
        others.await_loaded(None)
    others.close()


def test_a_process_that_hangs_is_ended_at_once(checkpoint):
    statuses: list[int] = []
    others = PartProcesses(
        str(checkpoint), size=2, dtype="auto", kv_dtype="auto", device="cpu", threads=1, abort=statuses.append
    )
    others.followers.late_at_s = 0.0
    lost: list[str] = []
    others.watch(lost.append)
    others._watching.join(20.0)
    assert lost == ["the parts of this shard did not come back from a step"]
    assert statuses == [2]
    others.close()
