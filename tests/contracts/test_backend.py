"""What every backend must do, whatever is behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from backends.base import Backend
from backends.fake import Answer, FakeBackend
from backends.link import LinkOptions
from backends.openai_compatible import OpenAICompatible
from backends.shard import ShardBackend
from policies.errors import BackendFailed, ContextExceeded, ExpectedError
from policies.nouns import Request
from shards.nouns import Submission
from shards.scripted import ScriptedEngine, ScriptedModel, ScriptedOptions
from shards.server import ShardServer
from tests.backends.parts import END, a_model_folder, a_prompt, a_request, everything, ids_of, text_of
from tests.backends.upstream import DONE, Upstream, an_upstream, said, used
from tests.shards.attached import a_shard, eventually

TEXT = "Grüße, 世界 😀!"
NOWHERE = "127.0.0.1:1"


class Stage(Protocol):
    """A backend and what is behind it."""

    backend: Backend

    def hang(self) -> None:
        """After the first piece of the next answer nothing follows."""

    def refuse(self) -> Request:
        """A request that will be refused."""

    @property
    def open_behind(self) -> int:
        """Generations that go on behind the backend."""


class FakeStage:
    def __init__(self) -> None:
        self.backend: FakeBackend = FakeBackend("f", script=Answer(tuple(TEXT)))

    def hang(self) -> None:
        self.backend.script = Answer(tuple(TEXT), hangs_at=1)

    def refuse(self) -> Request:
        self.backend.script = Answer(error=ContextExceeded("too long"))
        return a_request()

    @property
    def open_behind(self) -> int:
        return self.backend.open_requests


class ShardStage:
    def __init__(self, backend: ShardBackend, engine: ScriptedEngine, server: ShardServer) -> None:
        self.backend, self._engine, self._server = backend, engine, server

    def hang(self) -> None:
        self._engine.is_held = True

    def refuse(self) -> Request:
        return a_request(max_new_tokens=10**6)

    @property
    def open_behind(self) -> int:
        return len(self._engine.sequences) + self._server.service.open_requests


class OpenAIStage:
    def __init__(self, backend: OpenAICompatible, upstream: Upstream) -> None:
        self.backend, self._upstream = backend, upstream

    def hang(self) -> None:
        self._upstream.pieces = [said("G"), None]

    def refuse(self) -> Request:
        self._upstream.status, self._upstream.body = 400, b'{"error": {"message": "maximum context length is 5"}}'
        return a_request()

    @property
    def open_behind(self) -> int:
        return self._upstream.open_requests


@asynccontextmanager
async def a_fake_stage(folder: Path) -> AsyncIterator[FakeStage]:
    stage = FakeStage()
    yield stage
    stage.backend.check()


@asynccontextmanager
async def a_shard_stage(folder: Path) -> AsyncIterator[ShardStage]:
    def answer(submission: Submission, prompt: bytes, choice: int) -> tuple[int, ...]:
        return ids_of(TEXT + END)

    model, options = ScriptedModel(path=a_model_folder(folder)), ScriptedOptions(prefill_tokens=2)
    engine = ScriptedEngine(answer, model=model, options=options)
    async with a_shard(engine) as server:
        backend = ShardBackend("s", server.address, pool="p")
        yield ShardStage(backend, engine, server)
        backend.check()


@asynccontextmanager
async def an_openai_stage(folder: Path) -> AsyncIterator[OpenAIStage]:
    # cut at every byte, so that no character and no event comes whole
    stream = b"".join([said(role="assistant"), said(TEXT[:6]), said(TEXT[6:]), said(None, "stop"), used(5, 9, 2), DONE])
    async with an_upstream(pieces=[stream[at : at + 3] for at in range(0, len(stream), 3)]) as upstream:
        yield OpenAIStage(OpenAICompatible("o", upstream.url, pool="p"), upstream)


Stages = Callable[[Path], AbstractAsyncContextManager[Stage]]
STAGES: dict[str, Any] = {"fake": a_fake_stage, "shard": a_shard_stage, "openai_compatible": an_openai_stage}


def an_unreachable(kind: str) -> Backend:
    if kind == "fake":
        return FakeBackend("f", is_well=False)
    if kind == "openai_compatible":
        return OpenAICompatible("o", f"http://{NOWHERE}", pool="p")
    return ShardBackend("s", NOWHERE, pool="p", options=LinkOptions(first_backoff_s=0.01))


@pytest.fixture(params=list(STAGES))
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    async with STAGES[request.param](tmp_path) as stage:
        await stage.backend.start()
        await stage.backend.probe()
        yield stage
        await stage.backend.close()


@pytest.fixture(params=list(STAGES))
async def unreachable(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    backend = an_unreachable(request.param)
    await backend.start()
    yield backend
    await backend.close()


async def test_an_answer_streams_until_it_is_finished_and_ends_with_usage(stage: Stage) -> None:
    deltas = await everything(stage.backend)
    assert text_of(deltas) == TEXT
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.prompt_tokens == 5
    assert deltas[-1].usage.completion_tokens > 0
    await eventually(lambda: stage.open_behind == 0)


async def test_no_piece_of_text_has_half_a_character(stage: Stage) -> None:
    assert all("\ufffd" not in delta.text for delta in await everything(stage.backend))


async def test_progress_comes_alone(stage: Stage) -> None:
    for delta in await everything(stage.backend):
        if delta.computed_tokens is not None:
            assert (delta.text, delta.token_ids, delta.finish_reason, delta.usage) == ("", (), None, None)


async def test_closing_in_the_middle_cancels_down_to_the_end(stage: Stage) -> None:
    stage.hang()
    async with aclosing(stage.backend.generate(a_request(), a_prompt())) as deltas:  # type: ignore[type-var]
        await anext(deltas)
        assert stage.open_behind > 0
    await eventually(lambda: stage.open_behind == 0)


async def test_cancelling_the_reader_cancels_down_to_the_end(stage: Stage) -> None:
    stage.hang()
    asking = asyncio.create_task(everything(stage.backend))
    await eventually(lambda: stage.open_behind > 0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await eventually(lambda: stage.open_behind == 0)


async def test_closing_before_the_first_piece_leaves_nothing_open(stage: Stage) -> None:
    stage.hang()
    async with aclosing(stage.backend.generate(a_request(), a_prompt())):  # type: ignore[type-var]
        pass
    assert stage.open_behind == 0


async def test_closing_the_backend_ends_what_runs(stage: Stage) -> None:
    stage.hang()
    asking = asyncio.create_task(everything(stage.backend))
    await eventually(lambda: stage.open_behind > 0)
    await stage.backend.close()
    with pytest.raises(BackendFailed):
        await asking
    await eventually(lambda: stage.open_behind == 0)


async def test_a_refusal_is_not_tried_elsewhere(stage: Stage) -> None:
    request = stage.refuse()
    with pytest.raises(ExpectedError) as failure:
        await everything(stage.backend, request)
    assert not failure.value.retryable
    assert isinstance(failure.value, ContextExceeded)
    await eventually(lambda: stage.open_behind == 0)


async def test_two_answers_at_once_do_not_mix(stage: Stage) -> None:
    both = await asyncio.gather(everything(stage.backend), everything(stage.backend))
    assert [text_of(deltas) for deltas in both] == [TEXT, TEXT]


async def test_what_is_well_says_what_it_serves(stage: Stage) -> None:
    described = stage.backend.describe()
    assert described is not None
    assert described.models
    assert stage.backend.name in repr(stage.backend)


async def test_what_cannot_be_reached_fails_its_probe_and_may_be_tried_elsewhere(unreachable: Backend) -> None:
    with pytest.raises(BackendFailed):
        await unreachable.probe()
    with pytest.raises(BackendFailed) as failure:
        await everything(unreachable)
    assert failure.value.retryable
