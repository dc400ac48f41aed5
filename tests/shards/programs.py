"""The shard's program in a process of its own, and its answers over the link."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from shards.wire import limits
from shards.wire.translate import unpack_ids
from shards.wire.v1 import shard_pb2 as wire
from tests.shards.attached import HandRouter

_ENDS_S = 20.0


def begun(model: Path | str, *options: str) -> subprocess.Popen[str]:
    """The program, started for `model` on a CPU, with one thread and little KV."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "shards",
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--device",
        "cpu",
    ]
    return subprocess.Popen(
        [*command, "--kv-memory", "0.01", "--threads", "1", *options], stderr=subprocess.PIPE, text=True
    )


def address_of(program: subprocess.Popen[str]) -> str:
    """Where `program` listens, once it serves."""
    assert program.stderr is not None
    said = ""
    while " serves " not in (line := program.stderr.readline()):
        assert line, f"the shard has ended: {said}"
        said += line
    return line.split()[-1]


@contextmanager
def serving(model: Path | str, *options: str) -> Iterator[str]:
    """The address of the program while it serves `model`; it is stopped as an operator stops it."""
    with begun(model, *options) as program:
        try:
            yield address_of(program)
        finally:
            program.terminate()
            _, said = program.communicate(timeout=_ENDS_S)
    assert program.returncode == 0, said


async def answers_at(address: str, prompts: list[list[int]], new: int, **sampling: Any) -> list[list[int]]:
    """The answers to `prompts`, asked side by side."""
    async with grpc.aio.insecure_channel(address, options=limits.CLIENT_OPTIONS) as channel:
        router = HandRouter(channel)
        await router.hello()
        for number, prompt in enumerate(prompts):
            asked = wire.Sampling(top_p=1, repetition_penalty=1, ignore_eos=True, **sampling)
            await router.ask(number, prompt, new, sampling=asked)
        for number in range(len(prompts)):
            if not any(end.request == number for report in router.reports for end in report.finished):
                await router.until_finished(number)
        drawn: list[list[int]] = [[] for _ in prompts]
        for report in router.reports:
            ids = unpack_ids(report.tokens.token_ids)
            start = 0
            # without counts each entry is one token
            counts = report.tokens.count or [1] * len(report.tokens.request)
            for request, count in zip(report.tokens.request, counts, strict=True):
                drawn[request] += ids[start : start + count]
                start += count
        router.call.cancel()
        return drawn
