from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from backends.base import Pinned
from backends.fake import MOST_KEPT, Answer, FakeBackend
from policies.errors import BackendFailed, BackendRefused
from policies.nouns import Delta, Usage
from tests.backends.parts import a_prompt, a_request, everything, text_of


async def test_it_answers_as_scripted_and_records_its_requests() -> None:
    fake = FakeBackend("f", script=Answer(("a", "b"), cached_tokens=3))
    request, prompt = a_request(), a_prompt()
    deltas = await everything(fake, request, prompt)
    assert deltas == [Delta(text="a"), Delta(text="b"), Delta(finish_reason="stop", usage=Usage(5, 2, 3))]
    assert list(fake.received) == [(request, prompt)]
    assert fake.finished == 1
    fake.check()


async def test_it_keeps_its_last_requests_alone() -> None:
    fake = FakeBackend("f", script=Answer(()))
    for at in range(MOST_KEPT + 2):
        await everything(fake, a_request(id=str(at)))
    assert [request.id for request, _ in fake.received] == [str(at) for at in range(2, MOST_KEPT + 2)]
    assert not fake.cache
    fake.check()


async def test_answers_come_one_after_the_other_and_the_last_again() -> None:
    fake = FakeBackend("f", script=[Answer(("a",)), Answer(("b",))])
    assert [text_of(await everything(fake)) for _ in range(3)] == ["a", "b", "b"]


async def test_a_script_may_look_at_the_request() -> None:
    fake = FakeBackend("f", script=lambda request, prompt: Answer((request.tenant,)))
    assert text_of(await everything(fake, a_request(tenant="acme"))) == "acme"


async def test_it_fails_as_scripted() -> None:
    fake = FakeBackend("f", script=Answer(("a", "b"), error=BackendRefused("no"), error_at=1))
    async with aclosing(fake.generate(a_request(), a_prompt())) as deltas:
        assert (await anext(deltas)).text == "a"
        with pytest.raises(BackendRefused):
            await anext(deltas)
    assert (fake.failed, fake.open_requests) == (1, 0)
    fake.check()


async def test_it_hangs_until_it_is_cancelled() -> None:
    fake = FakeBackend("f", script=Answer(hangs_at=0))
    asking = asyncio.create_task(everything(fake))
    await asyncio.sleep(0)
    assert fake.open_requests == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (fake.cancelled, fake.open_requests) == (1, 0)
    fake.check()


async def test_its_pauses_are_the_tests() -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    await everything(FakeBackend("f", script=Answer(("a", "b"), delay_s=5), sleep=sleep))
    assert pauses == [5, 5, 5]


async def test_one_that_is_not_well_fails_probe_and_requests() -> None:
    fake = FakeBackend("f", is_well=False)
    with pytest.raises(BackendFailed):
        await fake.probe()
    with pytest.raises(BackendFailed):
        await everything(fake)
    assert "1 failed" in repr(fake)


async def test_one_that_pins_keeps_what_it_answered_as_far_as_it_has_room() -> None:
    fake = FakeBackend("f", pins=True, most_pinned=3)
    await everything(fake, a_request(block_keys=(1, 2), domain="acme"), a_prompt())
    await everything(fake, a_request(block_keys=(3, 4), domain="labs"), a_prompt())
    assert await fake.pin("p", (1, 2, 9), domain="acme", for_s=5.0) == Pinned(held=2, pinned=2)
    assert await fake.pin("q", (3, 4), domain="labs", for_s=5.0) == Pinned(held=2, pinned=1)
    assert fake.load().pinnable_tokens == 0
    assert await fake.clear_domain("acme") == 2
    assert fake.pinned.keys() == {"q"}
    assert await fake.unpin("q") == 1
    assert fake.load().pinnable_tokens == 3 * 64


async def test_one_that_pins_does_not_while_it_is_not_well() -> None:
    fake = FakeBackend("f", pins=True, is_well=False)
    with pytest.raises(BackendFailed):
        await fake.pin("p", (1,), domain="acme", for_s=5.0)
