from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shards.announce import Announcement, Announcer
from shards.loop import EngineError
from shards.nouns import FinishReason, Submission
from shards.scripted import ScriptedEngine, ScriptedModel, ScriptedOptions
from shards.server import SERVICE, ServerOptions, ShardServer, serve
from shards.wire import limits
from shards.wire.translate import pack_keys, unpack_ids, unpack_keys
from shards.wire.v1 import shard_pb2 as wire
from shards.wire.v1 import shard_pb2_grpc
from tests.shards.attached import HandRouter, a_channel, a_shard, eventually

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def a_router(server: ShardServer, *, greeted: bool = True) -> AsyncIterator[HandRouter]:
    async with a_channel(server) as channel:
        router = HandRouter(channel)
        if greeted:
            await router.hello()
        yield router
        router.call.cancel()


async def health_of(channel: grpc.aio.Channel) -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    return int(reply.status)


async def status_of(router: HandRouter) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await router.until(lambda _: False)
    return failure.value.code(), failure.value.details() or ""


async def test_a_router_is_welcomed_with_what_the_shard_is() -> None:
    async with a_shard(shard="own-0") as server, a_router(server, greeted=False) as router:
        welcome = await router.hello()
        assert (welcome.shard, welcome.model, welcome.block_tokens) == ("own-0", "scripted", 64)
        assert (welcome.context_tokens, welcome.vocabulary, welcome.window_tokens) == (4096, 1000, 1024)
        assert not welcome.snapshot_follows
        assert router.reports[0].epoch == server.service.epoch


async def test_a_request_is_answered_step_by_step() -> None:
    async with a_shard() as server, a_router(server) as router:
        await router.ask(7, list(range(300)), max_new_tokens=3)
        end = await router.until_finished(7)
        tokens = [token for report in router.reports for token in unpack_ids(report.tokens.token_ids)]
        computed = [progress.computed_tokens for report in router.reports for progress in report.progress]
        assert tokens == [300, 301, 302]
        assert computed[-1] == 300
        assert (end.reason, end.prompt_tokens, end.output_tokens) == (wire.Finished.LENGTH, 300, 3)
        assert router.reports[-1].HasField("load")
        assert max(sum(1 for _ in report.finished) for report in router.reports) == 1
        assert server.service.open_requests == 0


async def test_many_requests_share_one_report_per_step() -> None:
    engine = ScriptedEngine()
    async with a_shard(engine) as server, a_router(server) as router:
        engine.is_held = True
        for request in range(20):
            await router.ask(request, [request], max_new_tokens=5)
        await router.until(lambda report: report.HasField("load") and report.load.running == 20)
        engine.is_held = False
        await router.say(pace=wire.Pace(request=0))
        await router.until_finished(19)
        full = [report.tokens for report in router.reports if report.tokens.request]
        assert len(full) == 5
        assert all(list(tokens.request) == list(range(20)) for tokens in full)


async def test_requests_with_equal_numbers_on_two_streams_do_not_mix() -> None:
    async with a_shard() as server, a_router(server) as first, a_router(server) as second:
        await first.ask(1, [10])
        await second.ask(1, [20])
        await first.until_finished(1)
        await second.until_finished(1)
        assert [t for report in first.reports for t in unpack_ids(report.tokens.token_ids)] == [11, 12, 13]
        assert [t for report in second.reports for t in unpack_ids(report.tokens.token_ids)] == [21, 22, 23]


async def test_cache_events_reach_every_router_and_later_ones_get_a_snapshot() -> None:
    async with a_shard() as server, a_router(server) as first, a_router(server) as second:
        await first.ask(1, list(range(130)))
        event = (await second.until(lambda report: bool(report.cache))).cache[0]
        assert event.kind == wire.CacheEvent.STORED
        assert len(unpack_keys(event.keys)) == 2
        async with a_router(server, greeted=False) as late:
            assert (await late.hello()).snapshot_follows
            assert (await late.until(lambda report: bool(report.cache))).cache[0].keys == event.keys


async def test_a_large_snapshot_comes_in_small_messages() -> None:
    engine = ScriptedEngine()
    engine.remember(range(300_000))
    async with a_shard(engine) as server, a_router(server) as router:
        held = 0
        while held < 300_000:
            report = await router.read()
            held += sum(len(event.keys) // 8 for event in report.cache)
        assert max(report.ByteSize() for report in router.reports) <= limits.MESSAGE_BYTES


async def test_an_idle_router_keeps_a_fresh_view_of_the_load() -> None:
    engine = ScriptedEngine()
    async with a_shard(engine) as server, a_router(server) as busy, a_router(server) as idle:
        engine.is_held = True
        await busy.ask(1, [1])
        assert (await idle.until(lambda report: report.load.running == 1)).load.blocks_total == 1024
        await busy.say(cancel=wire.Cancel(request=1))
        await idle.until(lambda report: report.HasField("load") and report.load.running == 0)


async def test_an_idle_router_gets_heartbeats_even_before_the_first_step() -> None:
    async with a_shard(heartbeat_s=0.05) as server, a_channel(server) as channel:
        router = HandRouter(channel)
        assert (await router.hello()).heartbeat_ms == 50
        for _ in range(4):
            report = await router.until(lambda report: not report.HasField("welcome"))
            assert report.epoch == server.service.epoch


async def test_a_router_that_promised_heartbeats_and_sends_none_loses_its_stream_and_its_requests() -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine, heartbeat_s=0.05) as server, a_channel(server) as channel:
        router = HandRouter(channel)
        await router.say(hello=wire.Hello(router="hand", heartbeat_ms=20))
        await router.ask(1, [1])
        for _ in range(20):
            await asyncio.sleep(0.02)
            await router.say(heartbeat=wire.Heartbeat())
        assert server.service.open_requests == 1
        code, message = await status_of(router)
        assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "this router sent no heartbeat")
        await eventually(lambda: len(engine.cancelled) == 1)


async def test_a_router_that_promised_no_heartbeats_may_be_silent() -> None:
    async with a_shard(heartbeat_s=0.02) as server, a_router(server) as router:
        await asyncio.sleep(0.5)
        await router.ask(1, [1])
        assert (await router.until_finished(1)).reason == wire.Finished.LENGTH


async def test_closing_a_stream_cancels_all_its_requests() -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine) as server:
        async with a_router(server) as router:
            await router.ask(1, [1])
            await router.ask(2, [1])
            await eventually(lambda: len(engine.sequences) == 2)
        await eventually(lambda: len(engine.cancelled) == 2 and not server.service.open_requests)


async def test_a_router_that_says_it_is_done_is_let_go() -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine) as server, a_router(server) as router:
        await router.ask(1, [1])
        await eventually(lambda: len(engine.sequences) == 1)
        await router.call.done_writing()
        await eventually(lambda: len(engine.cancelled) == 1)
        while await router.call.read() is not grpc.aio.EOF:
            pass
        assert await router.call.code() == grpc.StatusCode.OK


async def test_cancel_ends_a_request_that_has_begun() -> None:
    engine = ScriptedEngine()
    async with a_shard(engine) as server, a_router(server) as router:
        engine.is_held = True
        await router.ask(1, [1])
        await router.until(lambda report: bool(report.progress))
        await router.say(cancel=wire.Cancel(request=1))
        assert (await router.until_finished(1)).reason == wire.Finished.CANCELLED


async def test_pace_reaches_the_engine() -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine) as server, a_router(server) as router:
        await router.ask(1, [1])
        await router.say(pace=wire.Pace(request=1, rank=3, paused=True))
        await router.say(pace=wire.Pace(request=99, rank=3))
        await eventually(lambda: bool(engine.paced))
        assert [steer[1:] for steer in engine.paced] == [(3, None, True)]


@pytest.mark.parametrize(
    "command",
    [
        {"submit": wire.Submit(request=1, prompt_tokens=1, max_new_tokens=1)},
        {},
    ],
)
async def test_a_router_that_does_not_greet_is_sent_away(command: dict[str, Any]) -> None:
    async with a_shard() as server, a_router(server, greeted=False) as router:
        await router.say(**command)
        code, message = await status_of(router)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "Hello" in message


@pytest.mark.parametrize(
    ("command", "complaint"), [({}, "does not know the command"), ({"hello": wire.Hello()}, "a second Hello")]
)
async def test_a_protocol_violation_ends_the_stream_and_cancels_its_requests(
    command: dict[str, Any], complaint: str
) -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine) as server, a_router(server) as router:
        await router.ask(1, [1])
        await router.say(**command)
        code, message = await status_of(router)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert complaint in message
        await eventually(lambda: len(engine.cancelled) == 1)


async def test_tokens_that_are_no_whole_number_reject_their_request_and_no_other() -> None:
    async with a_shard() as server, a_router(server) as router:
        await router.say(submit=wire.Submit(request=1, prompt_tokens=2, max_new_tokens=1))
        await router.say(prompt=wire.Prompt(request=1, token_ids=b"abc"))
        end = await router.until_finished(1)
        assert (end.reason, end.cause) == (wire.Finished.REJECTED, wire.Finished.INVALID)
        await router.ask(2, [1])
        assert (await router.until_finished(2)).reason == wire.Finished.LENGTH


async def test_a_request_for_more_choices_than_there_can_be_is_forgotten_once_it_was_rejected() -> None:
    pytest.importorskip("torch")
    from shards.engine import Engine, EngineOptions
    from shards.exec.fake import FakeNetwork
    from shards.model import Model

    async with (
        a_shard(Engine(Model("m", FakeNetwork()), EngineOptions(kv_blocks=4))) as server,
        a_router(server) as router,
    ):
        await router.ask(1, [1], choices=2**32 - 1)
        end = await router.until_finished(1)
        assert (end.reason, end.cause) == (wire.Finished.REJECTED, wire.Finished.INVALID)
        assert not server.service.open_requests


async def test_a_number_that_is_submitted_twice_is_rejected_once() -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine) as server, a_router(server) as router:
        await router.ask(1, [1])
        await router.ask(1, [1])
        end = await router.until_finished(1)
        assert (end.reason, end.cause) == (wire.Finished.REJECTED, wire.Finished.INVALID)
        assert "twice" in end.message
        assert not server.service.open_requests
        engine.is_held = False
        await router.ask(1, [1])
        assert (await router.until_finished(1)).reason == wire.Finished.LENGTH


async def test_a_prompt_for_a_request_that_is_not_there_is_ignored() -> None:
    async with a_shard() as server, a_router(server) as router:
        await router.say(prompt=wire.Prompt(request=42, token_ids=b"abc"))
        await router.ask(1, [1])
        await router.until_finished(1)
        assert all(end.request == 1 for report in router.reports for end in report.finished)


async def test_a_router_that_does_not_read_is_dropped_and_others_are_served() -> None:
    answer = (1,) * 4000
    engine = ScriptedEngine(lambda submission, prompt, choice: answer)
    async with a_shard(engine, outbox_bytes=20_000) as server, a_router(server) as slow, a_router(server) as good:
        reading = asyncio.create_task(good.until_finished(5))
        # HTTP/2 lets about 64 KiB go before the slow one's window is full
        await slow.ask(1, [1], max_new_tokens=4000, choices=64)
        await good.ask(5, [1])
        assert (await reading).reason == wire.Finished.LENGTH
        await eventually(lambda: len(engine.cancelled) == 1)
        assert (await status_of(slow))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_models_files_come_in_pieces(tmp_path: Path) -> None:
    content = os.urandom(600_000)
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "config.json").write_bytes(b"")
    (tmp_path / "secrets.txt").write_bytes(b"no")
    engine = ScriptedEngine(model=ScriptedModel(path=tmp_path))
    async with a_shard(engine) as server, a_channel(server) as channel:
        stub: Any = shard_pb2_grpc.ShardStub(channel)  # type: ignore[no-untyped-call]
        pieces = [piece async for piece in stub.Assets(wire.AssetsRequest())]
    assert [(piece.file, piece.last) for piece in pieces] == [
        *[("tokenizer.json", False)] * 2,
        ("tokenizer.json", True),
        ("config.json", True),
    ]
    assert b"".join(piece.content for piece in pieces) == content


async def test_health_and_reflection_are_served() -> None:
    async with a_shard() as server, a_channel(server) as channel:
        assert await health_of(channel) == SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in stub.ServerReflectionInfo(iter([ask])):
            assert SERVICE in {service.name for service in reply.list_services_response.service}
            break


async def test_an_engine_that_fails_turns_the_shard_sick_and_ends_its_streams() -> None:
    engine = ScriptedEngine()
    async with a_shard(engine) as server, a_router(server) as router, a_channel(server) as channel:
        engine.failure = RuntimeError("CUDA is gone")
        await router.ask(1, [1])
        code, message = await status_of(router)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "CUDA is gone" in message
        assert await health_of(channel) == NOT_SERVING


async def test_a_draining_shard_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine, grace_s=5) as server, a_router(server) as router, a_channel(server) as channel:
        await router.ask(1, [1])
        await router.until(lambda report: bool(report.progress))
        draining = asyncio.create_task(server.drain())
        await eventually(lambda: server.service.is_draining)
        await router.ask(2, [1], choices=2)
        refusal = await router.until_finished(2)
        assert (refusal.reason, refusal.cause) == (wire.Finished.REJECTED, wire.Finished.DRAINING)
        assert [end.choice for end in router.reports[-1].finished] == [0, 1]
        assert await health_of(channel) == NOT_SERVING
        assert not draining.done()
        engine.is_held = False
        await router.say(pace=wire.Pace(request=1))
        assert (await router.until_finished(1)).reason == wire.Finished.LENGTH
        await draining


async def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine, grace_s=0.05) as server, a_router(server) as router:
        await router.ask(1, [1])
        await eventually(lambda: server.service.open_requests == 1)
        await server.drain()
        assert server.service.open_requests == 1


def an_exchanging_engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.kv_address, engine.kv_group = ":7002", "ab" * 32
    return engine


async def test_a_draining_shard_hands_its_kv_over_to_the_shards_that_its_router_names() -> None:
    engine = an_exchanging_engine()
    async with a_shard(engine, grace_s=30) as server, a_router(server) as router:
        await router.say(hand_over=wire.HandOver(address=["10.0.0.7:7002"]))
        await router.ask(1, [1])
        await router.until_finished(1)
        draining = asyncio.create_task(server.drain())
        await router.until(lambda report: report.load.draining)
        assert engine.handed_over == []
        engine.is_handing_over = True
        await router.say(hand_over=wire.HandOver(address=["10.0.0.8:7002", "10.0.0.9:7002"]))
        await eventually(lambda: bool(engine.handed_over))
        assert engine.handed_over == [("10.0.0.8:7002", "10.0.0.9:7002")]
        await asyncio.sleep(0.05)
        assert not draining.done()
        engine.is_handing_over = False
        await draining


async def test_a_draining_shard_without_heirs_stops_at_once() -> None:
    engine = an_exchanging_engine()
    async with a_shard(engine, grace_s=30) as server, a_router(server) as router:
        await router.ask(1, [1])
        await router.until_finished(1)
        draining = asyncio.create_task(server.drain())
        await router.until(lambda report: report.load.draining)
        assert not draining.done()
        await router.say(hand_over=wire.HandOver())
        async with asyncio.timeout(0.5):
            await draining
        assert engine.handed_over == []


async def test_a_draining_shard_waits_only_for_a_moment_for_a_router_that_names_nothing() -> None:
    async with a_shard(an_exchanging_engine(), grace_s=30) as server, a_router(server):
        async with asyncio.timeout(5):
            await server.drain()


async def test_serve_says_where_it_listens_and_ends_on_sigterm() -> None:
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(ScriptedEngine(), "127.0.0.1:0", on_listening=listening.set_result))
    address = await asyncio.wait_for(listening, 5)
    assert not address.endswith(":0")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)


class HeldAnnouncer(Announcer):
    """Its routers answer when the test says so."""

    def __init__(self, address: str) -> None:
        super().__init__(Announcement((), "own", address))
        self.may_stop = asyncio.Event()

    async def stop(self) -> None:
        await self.may_stop.wait()
        await super().stop()


async def test_a_shard_drains_while_its_announcement_is_taken_back() -> None:
    announcers: list[HeldAnnouncer] = []

    def announcer(address: str) -> Announcer:
        announcers.append(HeldAnnouncer(address))
        return announcers[0]

    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(ScriptedEngine(), "127.0.0.1:0", on_listening=listening.set_result, announcer=announcer)
    )
    async with grpc.aio.insecure_channel(await asyncio.wait_for(listening, 5)) as channel:
        assert await health_of(channel) == SERVING
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            while await health_of(channel) == SERVING:
                pass
        assert not serving.done()
    announcers[0].may_stop.set()
    await asyncio.wait_for(serving, 5)


async def test_serve_raises_what_the_engine_died_of() -> None:
    engine = ScriptedEngine()
    engine.failure = RuntimeError("CUDA is gone")
    with pytest.raises(EngineError, match="CUDA is gone"):
        await asyncio.wait_for(serve(engine, "127.0.0.1:0"), 5)


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with a_shard() as server:
        with pytest.raises(OSError, match="cannot listen on"):
            await ShardServer(ScriptedEngine(), server.address).start()


async def test_an_engine_that_is_full_says_so() -> None:
    engine = ScriptedEngine(options=ScriptedOptions(max_running=1, max_waiting=0))
    engine.is_held = True
    async with a_shard(engine) as server, a_router(server) as router:
        await router.ask(1, [1])
        await router.ask(2, [1])
        end = await router.until_finished(2)
        assert (end.reason, end.cause) == (wire.Finished.REJECTED, wire.Finished.OVERLOADED)


async def test_the_real_engine_serves_the_bundled_model() -> None:
    pytest.importorskip("torch")
    from shards.bundled import weights
    from shards.engine import Engine, EngineOptions
    from shards.model import Model

    engine = Engine(Model.load(weights(), name="bundled"), EngineOptions(kv_blocks=64))
    server = ShardServer(engine, "127.0.0.1:0", ServerOptions())
    await server.start()
    async with a_router(server) as router:
        await router.ask(1, list(range(10, 110)), max_new_tokens=4)
        end = await router.until_finished(1)
        assert end.reason in (wire.Finished.LENGTH, wire.Finished.STOP)
        assert any(report.cache for report in router.reports)
        await router.ask(2, [10**6], max_new_tokens=4)
        assert (await router.until_finished(2)).cause == wire.Finished.INVALID
        await server.check()
    await server.close()


def test_the_scripted_engine_ends_every_choice_once() -> None:
    engine = ScriptedEngine(lambda submission, prompt, choice: (1,) * (choice + 1))
    engine.submit(Submission("key", 1, 9, choices=3))
    engine.extend("key", b"\x01\0\0\0")
    ends = [end for _ in range(3) for end in engine.step().finished]
    engine.cancel("key")
    ends += engine.step().finished
    reasons = {end.choice: end.reason for end in ends}
    assert len(ends) == 3
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.STOP, 2: FinishReason.CANCELLED}


async def test_pins_are_answered_with_what_is_held_and_kept() -> None:
    engine = ScriptedEngine()
    engine.remember(range(1, 6), "acme")
    engine.pinnable = 4
    async with a_shard(engine) as server, a_router(server) as router:
        keys = pack_keys([1, 2, 3, 4, 5, 6])
        await router.say(pin=wire.Pin(call=7, name="p", domain="acme", keys=keys, for_ms=60_000))
        report = await router.until(lambda report: bool(report.answers))
        assert list(report.answers) == [wire.CacheAnswer(call=7, blocks=4, held_blocks=5)]
        assert engine.pins == {"p": {1: 60.0, 2: 60.0, 3: 60.0, 4: 60.0}}
        await router.say(unpin=wire.Unpin(call=8, name="p"))
        report = await router.until(lambda report: bool(report.answers))
        assert list(report.answers) == [wire.CacheAnswer(call=8, blocks=4)]


async def test_a_cleared_domain_is_answered_and_reported_to_every_router() -> None:
    engine = ScriptedEngine()
    engine.remember([1, 2], "acme")
    engine.remember([3], "labs")
    async with a_shard(engine) as server, a_router(server) as router, a_router(server) as other:
        await router.say(clear=wire.Clear(call=1, domain="acme"))
        report = await router.until(lambda report: bool(report.answers))
        assert list(report.answers) == [wire.CacheAnswer(call=1, blocks=2)]
        for each in (router, other):
            gone = await each.until(
                lambda report: bool(report.cache) and report.cache[0].kind == wire.CacheEvent.EVICTED
            )
            assert unpack_keys(gone.cache[0].keys) == (1, 2)
        assert not any(report.answers for report in other.reports)


async def test_a_pin_of_broken_keys_ends_the_stream() -> None:
    async with a_shard() as server, a_router(server) as router:
        await router.say(pin=wire.Pin(call=1, name="p", keys=b"123"))
        code, message = await status_of(router)
        assert (code, "whole uint64s" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


class SlowContext:
    """Never sends its first message: gRPC sends the initial metadata once, and `abort` fails while a message
    that carries it is on its way ("too many operations" of the C core).
    """

    def __init__(self) -> None:
        self.is_begun = self.is_writing_the_beginning = False
        self.ended: grpc.StatusCode | None = None

    async def send_initial_metadata(self, _: object) -> None:
        self.is_begun = True

    async def write(self, _: object) -> None:
        self.is_writing_the_beginning = not self.is_begun
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, _: str) -> None:
        assert not self.is_writing_the_beginning, "too many operations"
        self.ended = code


async def test_a_stream_ends_with_its_status_even_if_its_first_report_is_still_being_sent() -> None:
    async def commands() -> AsyncIterator[wire.Command]:
        yield wire.Command(hello=wire.Hello(router="hand"))
        await asyncio.sleep(0.01)
        yield wire.Command(pin=wire.Pin(call=1, name="p", keys=b"123"))

    context: Any = SlowContext()
    async with a_shard() as server:
        await asyncio.wait_for(server.service.Attach(commands(), context), 5)
    assert context.ended is grpc.StatusCode.INVALID_ARGUMENT
