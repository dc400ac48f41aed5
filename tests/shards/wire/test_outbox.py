from __future__ import annotations

import asyncio
import random

import pytest

from shards.wire.outbox import Outbox
from shards.wire.v1 import shard_pb2 as wire


def a_report(size_bytes: int) -> wire.StepReport:
    return wire.StepReport(cache=[wire.CacheEvent(keys=bytes(size_bytes))])


async def test_a_message_that_does_not_fit_is_not_queued() -> None:
    outbox: Outbox[wire.StepReport] = Outbox(100)
    assert outbox.push(a_report(60))
    assert not outbox.push(a_report(60))
    assert (await outbox.take()).ByteSize() >= 60
    assert outbox.push(a_report(60))
    outbox.check()


async def test_take_waits_for_a_message() -> None:
    outbox: Outbox[wire.StepReport] = Outbox(100)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.push(wire.StepReport(step=3))
    assert (await taking).step == 3


@pytest.mark.parametrize("seed", range(20))
async def test_bytes_are_never_miscounted(seed: int) -> None:
    rng, outbox, queued = random.Random(seed), Outbox[wire.StepReport](500), 0
    for _ in range(100):
        if queued and rng.random() < 0.5:
            await outbox.take()
            queued -= 1
        else:
            queued += outbox.push(a_report(rng.randrange(200)))
        outbox.check()
    outbox.clear()
    outbox.check()
    assert repr(outbox) == "<Outbox 0 messages, 0 of 500 bytes>"
