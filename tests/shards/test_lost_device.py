"""A shard whose device fails for good ends as a process, so that it is started again."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import grpc
import pytest

from shards.wire import limits
from tests.shards.attached import HandRouter

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
async def test_a_shard_that_has_lost_its_device_ends_its_streams_and_its_process_with_an_error() -> None:
    command = [*("-m", "tests.shards.lost_device", "--threads", "1"), *("--listen", "127.0.0.1:0")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert process.stderr is not None
    line = ""
    while " on 127.0.0.1:" not in line:
        line = (await process.stderr.readline()).decode()
        assert line, "the shard did not start"
    async with grpc.aio.insecure_channel(line.rpartition(" ")[2].strip(), options=limits.CLIENT_OPTIONS) as channel:
        router = HandRouter(channel)
        await router.hello()
        await router.ask(1, [7, 8, 9])
        assert (await router.until_finished(1)).output_tokens == 3
        await router.ask(2, [7, 251, 251])
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await router.until_finished(2)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the device does not answer after a step failed: CUDA error: an illegal" in (ended.value.details() or "")
    said = (await asyncio.wait_for(process.communicate(), 60))[1].decode()
    assert process.returncode == 1
    assert "the engine failed: DeviceLost: the device does not answer" in said
    # full collections of a few hundred thousand objects would stop the engine for 120 ms
    spared = re.search(r"^(\d+) objects are spared", said, re.MULTILINE)
    assert spared is not None
    assert int(spared[1]) > 50_000
