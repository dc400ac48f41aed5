"""PartProcesses of one shard: they answer as one process does, and end together. Each start loads torch twice: 5 s."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards.engine import Engine, EngineOptions
from shards.exec.network import DeviceLost
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from shards.parallel.processes import PartProcesses, gpus, leading
from tests.shards.driver import packed
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
    processes.await_loaded()
    together = leading(part, processes)
    alone = Model.load(checkpoint)
    assert together.network.block_bytes == alone.network.block_bytes // 2
    expected = answers(alone, host_blocks=6)
    assert all(len(tokens) == 40 for tokens in expected.values())
    assert answers(together, host_blocks=6) == expected


def test_an_engine_ends_once_another_process_has(checkpoint, processes):
    part = Model.load(checkpoint, group=processes.group)
    processes.await_loaded()
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


def a_shard(checkpoint: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shards", "--model", str(checkpoint), "--listen", "127.0.0.1:0", "--device", "cpu"]
    return subprocess.Popen(
        [*command, "--kv-memory", "0.01", "--threads", "1", *options], stderr=subprocess.PIPE, text=True
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("victim", ["another", "the first"])
def test_an_idle_shard_ends_with_any_of_its_processes(checkpoint, victim):
    shard = a_shard(checkpoint, "--tensor-parallel", "2")
    assert shard.stderr is not None
    while "serves" not in (line := shard.stderr.readline()):
        assert line, "the shard has ended"
    (other,) = children(shard.pid)
    os.kill(other if victim == "another" else shard.pid, signal.SIGKILL)
    with shard.stderr:
        # both processes have it, so its end is that of both
        said = shard.stderr.read()
    if victim == "another":
        assert "part 1 of this shard ended with status -9" in said
    assert shard.wait(20) == (2 if victim == "another" else -9)


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
    shard = a_shard(checkpoint, *options)
    _, said = shard.communicate(timeout=60)
    assert shard.returncode == 2
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
    with pytest.raises(ValueError, match="part 1 cannot be loaded: architecture none is not supported"):
        others.await_loaded()
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
