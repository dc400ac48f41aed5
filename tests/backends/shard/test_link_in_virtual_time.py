"""A link stays attached for as long as both its ends live, whatever else is sent: minutes of traffic in virtual time.

Both ends are the real ones, with a stream between them that passes messages as gRPC does: in order, a bounded number of
them on the way, each after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.shard import link as link_module
from backends.shard.link import LinkOptions, ShardLink
from policies.errors import BackendFailed
from shards.nouns import Report
from shards.scripted import ScriptedEngine, ScriptedModel, ScriptedNetwork, ScriptedOptions
from shards.server import ServerOptions, facts_of
from shards.service import ShardService
from shards.wire.limits import HEARTBEAT_S, MISSED_BEATS, SILENT_BEATS
from shards.wire.translate import pack_ids
from shards.wire.v1 import shard_pb2 as wire
from tests.virtual_time import run_virtually

LATENCY_S = 0.02
ON_THE_WAY = 16


class Direction:
    """Messages from one end to the other. While it is `held` none arrives, as on a dead line."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(ON_THE_WAY)
        self.flows = asyncio.Event()
        self.flows.set()

    async def write(self, message: Any) -> None:
        await self._queue.put(type(message).FromString(message.SerializeToString()))

    async def read(self) -> Any:
        message = await self._queue.get()
        await self.flows.wait()
        await asyncio.sleep(LATENCY_S)
        return message


class Call:
    """The router's end of an Attach stream whose other end is `service`."""

    def __init__(self, service: ShardService) -> None:
        self.up, self.down = Direction(), Direction()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(service))

    async def write(self, command: wire.Command) -> None:
        await self._unless_ended(self.up.write(command))

    async def read(self) -> Any:
        return await self._unless_ended(self.down.read())

    def cancel(self) -> None:
        self._end("cancelled by the router")
        self._serving.cancel()

    async def send_initial_metadata(self, _: Any) -> None:
        pass

    async def abort(self, _: Any, message: str) -> None:
        self._end(message)

    async def _unless_ended(self, work: Awaitable[Any]) -> Any:
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait((doing, self.ended), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise BackendFailed(self.ended.result())
            return doing.result()
        finally:
            doing.cancel()

    async def _serve(self, service: ShardService) -> None:
        async def commands() -> AsyncIterator[wire.Command]:
            while True:
                yield await self.up.read()

        context = SimpleNamespace(
            send_initial_metadata=self.send_initial_metadata, abort=self.abort, write=self.down.write
        )
        await service.Attach(commands(), context)  # type: ignore[arg-type]

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


class Channel:
    """What a link needs of a gRPC channel, to `service`."""

    def __init__(self, service: ShardService, *, assets_s: float) -> None:
        self._service, self._assets_s = service, assets_s
        self.calls: list[Call] = []

    def get_state(self, *, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    def stream_stream(self, *_: Any, **__: Any) -> Callable[[], Call]:
        def attach() -> Call:
            self.calls.append(Call(self._service))
            return self.calls[-1]

        return attach

    def unary_stream(self, *_: Any, **__: Any) -> Callable[[Any], AsyncIterator[wire.AssetPiece]]:
        async def assets(_: Any) -> AsyncIterator[wire.AssetPiece]:
            await asyncio.sleep(self._assets_s)
            yield wire.AssetPiece(file="config.json", content=b"{}")

        return assets


@dataclass
class Steps:
    """Takes the place of EngineLoop: a step of the engine takes `step_s`, and commands wait for its end."""

    engine: ScriptedEngine
    step_s: float
    capacity: int = 4
    waiting: list[Callable[[Any], object]] = field(default_factory=list)
    is_handing_over = False

    def __post_init__(self) -> None:
        self.room = asyncio.Condition()
        self.hear: Callable[[Report], None] = lambda _: None

    def subscribe(self, hear: Callable[[Report], None]) -> None:
        self.hear = hear

    def post(self, command: Callable[[Any], object]) -> None:
        self.waiting.append(command)

    async def put(self, command: Callable[[Any], object]) -> None:
        async with self.room:
            await self.room.wait_for(lambda: len(self.waiting) < self.capacity)
        self.post(command)

    def ask(self, question: Callable[[Any], Any], answer: Callable[[Any], object]) -> None:
        self.post(lambda engine: answer(question(engine)))

    async def ask_in_turn(self, question: Callable[[Any], Any], answer: Callable[[Any], object]) -> None:
        await self.put(lambda engine: answer(question(engine)))

    async def run(self) -> None:
        while True:
            commands, self.waiting = self.waiting, []
            async with self.room:
                self.room.notify_all()
            for command in commands:
                command(self.engine)
            if self.engine.has_work:
                await asyncio.sleep(self.step_s)
                self.hear(self.engine.step())
            else:
                await asyncio.sleep(0.01)


@dataclass
class Site:
    """A link, its shard, and what lies between them."""

    link: ShardLink
    service: ShardService
    channel: Channel
    engine: ScriptedEngine

    @property
    def line(self) -> Call:
        return self.channel.calls[-1]

    async def answered(self, tokens: int, *, new: int = 2) -> int:
        """Sends a prompt; returns the number of tokens of its answer."""
        submit = wire.Submit(prompt_tokens=tokens, max_new_tokens=new)
        number, inbox = self.link.submit(submit, pack_ids(list(range(tokens))))
        drawn = 0
        try:
            while not inbox.is_over:
                drawn += sum(len(piece.token_ids) for piece in (await inbox.take()).pieces)
        finally:
            self.link.forget(number)
        return drawn


@contextlib.asynccontextmanager
async def a_site(
    *, step_s: float = 0.5, assets_s: float = 0.0, per_step: int = 4, window: int = 1024
) -> AsyncIterator[Site]:
    loop = asyncio.get_running_loop()
    model = ScriptedModel(network=ScriptedNetwork(context_tokens=1 << 20))
    engine = ScriptedEngine(model=model, options=ScriptedOptions(window_tokens=window, prefill_tokens=per_step))
    steps = Steps(engine, step_s)
    service = ShardService(steps, facts_of(engine, ServerOptions()), None, clock=loop.time)  # type: ignore[arg-type]
    channel = Channel(service, assets_s=assets_s)

    async def keep_fresh() -> None:
        while True:
            await asyncio.sleep(0.1)
            service.refresh(0.1)

    @contextlib.asynccontextmanager
    async def opened(*_: Any) -> AsyncIterator[Channel]:
        yield channel

    async def open_channel(*_: Any) -> Any:
        return opened()

    tasks = [asyncio.create_task(steps.run()), asyncio.create_task(keep_fresh())]
    for task in tasks:
        # an exception in a callback ends the run
        task.add_done_callback(lambda task: task.cancelled() or task.result())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_module, "open_channel", open_channel)
        link = ShardLink("b", "s:1", options=LinkOptions(), clock=loop.time)
        link.start()
        try:
            await link._settled.wait()
            yield Site(link, service, channel, engine)
            link.check()
            service.check()
        finally:
            await link.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_a_prompt_that_takes_a_minute_is_answered_over_the_first_stream() -> None:
    async def run() -> None:
        async with a_site(step_s=0.5, per_step=4) as site:
            assert await site.answered(480) == 2
            assert asyncio.get_running_loop().time() > 60
            assert len(site.channel.calls) == 1

    run_virtually(run())


def test_one_step_of_a_minute_is_no_silence_of_the_router() -> None:
    # five commands do not fit the engine's queue, so the shard reads nothing until the step ends
    async def run() -> None:
        async with a_site(step_s=60.0, per_step=1 << 20) as site:
            answers = await asyncio.gather(*(site.answered(8, new=1) for _ in range(9)))
            assert answers == [1] * 9
            assert len(site.channel.calls) == 1

    run_virtually(run())


def test_a_router_that_fetches_the_models_files_for_long_is_no_silent_one() -> None:
    async def run() -> None:
        async with a_site(assets_s=25.0) as site:
            assert await site.answered(8) == 2
            assert len(site.channel.calls) == 1

    run_virtually(run())


def test_a_dead_line_is_noticed_by_both_ends_in_time_although_a_request_waits() -> None:
    async def run() -> None:
        async with a_site() as site:
            await asyncio.sleep(5.0)
            site.engine.is_held = True
            asking = asyncio.create_task(site.answered(8))
            await asyncio.sleep(5.0)
            cut_at = asyncio.get_running_loop().time()
            line = site.line
            line.up.flows.clear()
            line.down.flows.clear()
            reason = await line.ended
            assert "no heartbeat" in reason
            assert asyncio.get_running_loop().time() - cut_at <= (MISSED_BEATS + 1) * HEARTBEAT_S + 1
            with pytest.raises(BackendFailed):
                await asking

    run_virtually(run())


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, 400), st.integers(1, 30)),
            st.tuples(st.just("cancel"), st.integers(1, 400), st.floats(0.01, 15.0)),
            st.tuples(st.just("wait"), st.floats(0.01, 20.0), st.just(0)),
            st.tuples(st.just("slow reader"), st.floats(0.1, 2.0), st.just(0)),
            st.tuples(st.just("pace"), st.integers(1, 200), st.just(0)),
            st.tuples(st.just("clear"), st.just(0), st.just(0)),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0.01, 0.3, 0.9, 1.1, 4.0]),
    st.sampled_from([64, 1024]),
)
def test_any_mix_of_traffic_keeps_the_link(events: list[tuple[str, Any, Any]], step_s: float, window: int) -> None:
    """Progress, cancels, pauses of the reader, commands with answers, and silence: one stream carries all of it."""

    async def run() -> None:
        async with a_site(step_s=step_s, window=window) as site:
            asked: list[asyncio.Task[int]] = []
            for event, size, more in events:
                if event == "ask":
                    asked.append(asyncio.create_task(site.answered(size, new=more)))
                elif event == "cancel":
                    leaving = asyncio.create_task(site.answered(size))
                    await asyncio.sleep(more)
                    leaving.cancel()
                elif event == "slow reader":
                    site.line.down.flows.clear()
                    await asyncio.sleep(size)
                    site.line.down.flows.set()
                elif event == "pace":
                    for number in range(size):
                        site.link.tell(wire.Command(pace=wire.Pace(request=number)))
                        await asyncio.sleep(0.05)
                elif event == "clear":
                    await asyncio.sleep(0)
                    site.link.tell(wire.Command(clear=wire.Clear(call=99)))
                else:
                    await asyncio.sleep(size)
                assert len(site.channel.calls) == 1
            for asking in asked:
                assert await asking >= 1
            # a cancellation takes effect behind the step that runs, and is reported behind the next
            await asyncio.sleep(2 * SILENT_BEATS * HEARTBEAT_S + 3 * step_s)
            assert len(site.channel.calls) == 1
            assert site.service.open_requests == 0

    run_virtually(run())
