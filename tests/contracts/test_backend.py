"""The contract of every backend, whatever server is behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from backends.base import Backend
from backends.http.backend import HttpBackend
from backends.kinds import KINDS
from policies.errors import BackendFailed, ContextExceeded, ExpectedError
from policies.nouns import Native
from tests.backends.parts import Taken, a_prompt, a_request, everything, text_of
from tests.contracts.catalogue import STAGES
from tests.contracts.stage import Stage
from tests.shards.attached import eventually
from tests.standins.standin import TEXT

STREAMED = a_request(stream=True)


@pytest.fixture(params=list(STAGES))
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    async with STAGES[request.param].a_stage(tmp_path) as stage:
        await stage.backend.start()
        await stage.backend.probe()
        yield stage
        await stage.backend.close()


@pytest.fixture(params=list(STAGES))
async def unreachable(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    backend: Backend = STAGES[request.param].an_unreachable()
    await backend.start()
    yield backend
    await backend.close()


def test_every_kind_is_held_to_this() -> None:
    assert {name.partition(" ")[0] for name in STAGES} == set(KINDS)


async def test_an_answer_streams_until_it_is_finished_and_ends_with_usage(stage: Stage) -> None:
    deltas = await everything(stage.backend, STREAMED, stage.prompt)
    assert text_of(deltas) == TEXT
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.prompt_tokens == 5
    assert deltas[-1].usage.completion_tokens > 0
    await eventually(lambda: stage.open_behind == 0)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_what_is_relayed_is_the_same_answer(stage: Stage, *, is_slow: bool) -> None:
    if not isinstance(stage.backend, HttpBackend):
        pytest.skip("it only streams")
    taken = Taken(is_slow=is_slow)
    await stage.backend.relay(STREAMED, stage.prompt, taken)
    assert text_of(taken.deltas) == TEXT
    assert taken.deltas[-1].usage is not None
    await eventually(lambda: stage.open_behind == 0)


async def test_cancelling_a_relay_cancels_down_to_the_end(stage: Stage) -> None:
    if not isinstance(stage.backend, HttpBackend):
        pytest.skip("it only streams")
    stage.hang()
    asking = asyncio.create_task(stage.backend.relay(STREAMED, stage.prompt, Taken()))
    await eventually(lambda: stage.open_behind > 0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await eventually(lambda: stage.open_behind == 0)


async def test_no_piece_of_text_has_half_a_character(stage: Stage) -> None:
    assert all("\ufffd" not in delta.text for delta in await everything(stage.backend, STREAMED, stage.prompt))


async def test_progress_comes_alone(stage: Stage) -> None:
    for delta in await everything(stage.backend, STREAMED, stage.prompt):
        if delta.computed_tokens is not None:
            assert (delta.text, delta.token_ids, delta.finish_reason, delta.usage) == ("", (), None, None)


async def test_closing_in_the_middle_cancels_down_to_the_end(stage: Stage) -> None:
    stage.hang()
    async with aclosing(stage.backend.generate(STREAMED, stage.prompt)) as deltas:
        await anext(deltas)
        assert stage.open_behind > 0
    await eventually(lambda: stage.open_behind == 0)


async def test_cancelling_the_reader_cancels_down_to_the_end(stage: Stage) -> None:
    stage.hang()
    asking = asyncio.create_task(everything(stage.backend, STREAMED, stage.prompt))
    await eventually(lambda: stage.open_behind > 0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await eventually(lambda: stage.open_behind == 0)


async def test_closing_before_the_first_piece_leaves_nothing_open(stage: Stage) -> None:
    stage.hang()
    async with aclosing(stage.backend.generate(STREAMED, stage.prompt)):
        pass
    assert stage.open_behind == 0


async def test_closing_the_backend_ends_what_runs(stage: Stage) -> None:
    stage.hang()
    asking = asyncio.create_task(everything(stage.backend, STREAMED, stage.prompt))
    await eventually(lambda: stage.open_behind > 0)
    await stage.backend.close()
    with pytest.raises(BackendFailed):
        await asking
    await eventually(lambda: stage.open_behind == 0)


async def test_a_refusal_is_not_tried_elsewhere(stage: Stage) -> None:
    request = stage.refuse()
    with pytest.raises(ExpectedError) as failure:
        await everything(stage.backend, request, stage.prompt)
    assert not failure.value.retryable
    assert isinstance(failure.value, ContextExceeded)
    await eventually(lambda: stage.open_behind == 0)


async def test_two_answers_at_once_do_not_mix(stage: Stage) -> None:
    both = await asyncio.gather(
        everything(stage.backend, STREAMED, stage.prompt), everything(stage.backend, STREAMED, stage.prompt)
    )
    assert [text_of(deltas) for deltas in both] == [TEXT, TEXT]


async def test_a_healthy_backend_describes_itself(stage: Stage) -> None:
    described = stage.backend.describe()
    assert described is not None
    assert described.models
    assert stage.backend.name in repr(stage.backend)


async def test_what_cannot_be_reached_fails_its_probe_and_may_be_tried_elsewhere(unreachable: Backend) -> None:
    with pytest.raises(BackendFailed):
        await unreachable.probe()
    # a text for those that take no chat, and a conversation for those that take nothing else
    chat = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
    text = {"model": "m", "prompt": "Hello"}
    with pytest.raises(BackendFailed) as failure:
        await everything(
            unreachable, prompt=a_prompt(path="/v1/completions", body=text, native=Native("/v1/messages", chat))
        )
    assert failure.value.retryable
