"""The pools of a running router follow its file: no request is lost, and nothing is left of what is gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from policies.sla.parse import parse
from router.operate.telemetry.decision_reader import records_of
from router.protocols.openai.request import chat_ask
from router.start.app import Router
from router.start.config_file import Contents
from router.start.reload import as_config
from tests.backends.upstream import DONE, Upstream, a_chunk, an_upstream, used
from tests.router.callers import Listener, ended
from tests.router.parts import a_chat
from tests.router.start.test_reload import Paper
from tests.shards.attached import eventually

KEYS = {"FIRST_KEY": "first", "SECOND_KEY": "second"}
SERVER = "server: {http: '127.0.0.1:0', grpc: off, drain: 5s}\n"


class KeyedPaper(Paper):
    """It may name keys of backends."""

    def read(self) -> Contents:
        return Contents(self, self.text, parse(self.text, source=str(self), environment=KEYS), None)


def a_pool(name: str, upstreams: Sequence[Upstream], more: str = "") -> str:
    at = ", ".join(f"'{upstream.url}'" for upstream in upstreams)
    return f"  {name}: {{kind: openai_compatible, at: [{at}], model: m, health: {{probe_every: 50ms}}{more}}}\n"


def a_file(*pools: str) -> str:
    return "pools:\n" + "".join(pools) + SERVER


@asynccontextmanager
async def upstreams(count: int, **script: Any) -> AsyncIterator[list[Upstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(an_upstream(**script)) for _ in range(count)]


@asynccontextmanager
async def a_router(paper: Paper) -> AsyncIterator[Router]:
    started = paper.read()
    async with Router(started.config, file=started) as router:
        assert await router.wait_until_reached(5)
        yield router
        await eventually(lambda: not router.gateway.doors.inside)
        router.check()


async def changed(router: Router, paper: Paper, text: str) -> str | None:
    paper.text = text
    assert router.reloader is not None
    return await router.reloader.reload()


async def asked(router: Router, **more: Any) -> tuple[int, str, str]:
    """The status of one streamed chat, the backend that answered, and all of the answer."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **more}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{router.http_url}/v1/chat/completions", json=body) as reply,
    ):
        return reply.status, reply.headers.get("x-pointsman-backend", ""), await reply.text()


def bare(upstream: Upstream) -> str:
    return upstream.url.partition("//")[2]


def names(router: Router) -> set[str]:
    return set(router.gateway.cluster.names())


async def test_a_new_pool_is_reached_and_a_removed_one_leaves() -> None:
    async with upstreams(2) as (first, second):
        paper = KeyedPaper(a_file(a_pool("own", [first])))
        async with a_router(paper) as router:
            assert await changed(router, paper, a_file(a_pool("own", [first]), a_pool("more", [second]))) is None
            await eventually(lambda: router.gateway.cluster.pools_ready() == {"own": True, "more": True})
            assert await changed(router, paper, a_file(a_pool("more", [second]))) is None
            await eventually(lambda: names(router) == {"more-0"})
            status, backend, text = await asked(router)
            assert (status, backend, "[DONE]" in text) == (200, "more-0", True)
            assert await changed(router, paper, a_file(a_pool("own", [second]))) is None
            await eventually(lambda: names(router) == {"own-0"})
            assert (await asked(router))[:2] == (200, "own-0")


async def test_an_address_that_stays_keeps_its_backend() -> None:
    async with upstreams(3) as (first, second, third):
        paper = KeyedPaper(a_file(a_pool("own", [first, second])))
        async with a_router(paper) as router:
            before = router.gateway.cluster.backend("own-0")
            assert await changed(router, paper, a_file(a_pool("own", [first, second, third]))) is None
            await eventually(lambda: names(router) == {"own-0", "own-1", "own-2"})
            assert await changed(router, paper, a_file(a_pool("own", [first, third]))) is None
            await eventually(lambda: names(router) == {"own-0", "own-1"})
            await eventually(lambda: router.gateway.cluster.backend("own-1").address == bare(third))
            assert router.gateway.cluster.backend("own-0") is before
            assert await changed(router, paper, a_file(a_pool("own", [first, third], ", tokenizer: none"))) is None
            assert router.gateway.cluster.backend("own-0") is before


async def test_a_stream_ends_at_the_backend_that_was_replaced_and_new_requests_go_to_the_other() -> None:
    gate = asyncio.Event()
    async with upstreams(1) as (upstream,):
        paper = KeyedPaper(a_file(a_pool("own", [upstream], ", key: '${env:FIRST_KEY}'")))
        async with a_router(paper) as router:
            end = (a_chunk(None, "stop"), used(5, 1), DONE)
            upstream.pieces = (a_chunk("Hello"), gate, *end)
            running = asyncio.create_task(asked(router))
            await eventually(lambda: upstream.open_requests == 1)
            old = router.gateway.cluster.backend("own-0")
            upstream.pieces = (a_chunk("Hello"), *end)
            assert await changed(router, paper, a_file(a_pool("own", [upstream], ", key: '${env:SECOND_KEY}'"))) is None
            await eventually(lambda: router.gateway.cluster.backend("own-0") is not old)
            assert (await asked(router))[0] == 200
            assert [headers["authorization"] for _, _, headers in upstream.received] == [
                "Bearer first",
                "Bearer second",
            ]
            assert not running.done()
            gate.set()
            status, _, text = await running
            assert (status, "[DONE]" in text) == (200, True)


async def test_what_operators_want_of_a_backend_goes_to_its_successor() -> None:
    async with upstreams(2) as (first, second):
        paper = KeyedPaper(a_file(a_pool("own", [first, second])))
        async with a_router(paper) as router:
            cluster = router.gateway.cluster
            cluster.drain("own-0")
            cluster.weigh("own-1", 0.5)
            old = cluster.backend("own-1")
            assert await changed(router, paper, a_file(a_pool("own", [second, first]))) is None
            await eventually(lambda: cluster.backend("own-1") is not old)
            assert (cluster.server_of("own-0").is_kept_out, cluster.server_of("own-1").weight) == (True, 0.5)


@pytest.mark.parametrize(
    ("more", "scheme", "problem"),
    [
        (", options: {nope: 1}", "http:", "nope"),
        (", tls: {ca: /not/there.pem}", "https:", "/not/there.pem"),
        (", models: 3", "http:", "models"),
        (", options: {events: 'tcp://x:1'}", "http:", "events"),
    ],
)
async def test_a_file_with_a_pool_that_cannot_be_is_refused_whole(
    more: str, scheme: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with upstreams(2) as (first, second):
        paper = KeyedPaper(a_file(a_pool("own", [first])))
        async with a_router(paper) as router:
            before = router.gateway.config
            text = a_file(a_pool("own", [second]), a_pool("more", [first], more))
            refusal = await changed(router, paper, text.replace(first.url, first.url.replace("http:", scheme)))
            assert refusal is not None
            assert problem in refusal
            assert router.gateway.config is before
            assert router.gateway.cluster.backend("own-0").address == bare(first)
            assert (await asked(router))[:2] == (200, "own-0")
    assert "stays in effect" in caplog.text


async def test_a_successor_that_answers_no_probe_takes_its_place_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.fleet.cluster.cluster.REPLACING_S", 0.2)
    async with upstreams(1) as (upstream,):
        paper = KeyedPaper(a_file(a_pool("own", [upstream])))
        async with a_router(paper) as router:
            old = router.gateway.cluster.backend("own-0")
            upstream.models_status = 500
            assert await changed(router, paper, a_file(a_pool("own", [upstream], ", key: '${env:FIRST_KEY}'"))) is None
            await eventually(lambda: router.gateway.cluster.backend("own-0") is not old)
            assert "passes no probe" in caplog.text
            upstream.models_status = 200
            await eventually(lambda: router.gateway.is_ready())
            assert (await asked(router))[0] == 200


async def test_a_request_that_waits_for_a_pool_that_goes_is_answered_by_the_pools_of_the_new_file() -> None:
    async with upstreams(2) as (first, second):
        ruled = "classes: {{chat: {{}}}}\nrules: [{{class: chat, pools: [{}]}}]\n"
        both = a_file(a_pool("own", [first]), a_pool("more", [second]))
        paper = KeyedPaper(ruled.format("own") + both)
        async with a_router(paper) as router:
            router.gateway.cluster.drain("own-0")
            waiting = asyncio.create_task(asked(router))
            await eventually(lambda: bool(router.gateway.dispatcher.waiting()[0]))
            assert await changed(router, paper, ruled.format("more") + a_file(a_pool("more", [second]))) is None
            assert (await waiting)[:2] == (200, "more-0")


async def test_a_request_in_the_moment_before_its_new_pool_joins_waits_for_it() -> None:
    async with upstreams(2) as (first, second):
        ruled = "classes: {{chat: {{}}}}\nrules: [{{class: chat, pools: [{}]}}]\n"
        paper = KeyedPaper(ruled.format("own") + a_file(a_pool("own", [first])))
        async with a_router(paper) as router:
            paper.text = ruled.format("more") + a_file(a_pool("more", [second]))
            as_config(router.operations, paper.read(), paper.read())
            # no task has run since: the pool has no backend
            assert names(router) == {"own-0"}
            caller = Listener(chat_ask(a_chat("hello", model="m", stream=True)), key=None)
            assert await ended(caller, router.gateway) is None
            assert caller.placed == ["more-0"]


async def test_random_changes_under_load_lose_no_request_leave_nothing_and_decisions_name_the_version(
    tmp_path: Path,
) -> None:
    """`benchmarks/config_soak.py` has the long form, with programs."""
    rng, log, versions = random.Random(1), tmp_path / "decisions.jsonl", set()
    async with upstreams(6) as there:

        def some_file() -> str:
            shuffled = rng.sample(there, len(there))
            pools, at = [], 0
            for name in rng.sample(["own", "more", "far"], rng.randrange(1, 4)):
                size = rng.randrange(1, 3)
                key = rng.choice(["", ", key: '${env:FIRST_KEY}'", ", key: '${env:SECOND_KEY}'"])
                pools.append(a_pool(name, shuffled[at : at + size], key))
                at += size
            return f"# {rng.random()}\n" + a_file(*pools).replace("grpc: off", f"grpc: off, decision_log: {log}")

        paper = KeyedPaper(some_file())
        answers: list[tuple[int, str, str]] = []
        async with a_router(paper) as router:
            is_over = False

            async def ask() -> None:
                while not is_over:
                    answers.append(await asked(router))

            asking = [asyncio.create_task(ask()) for _ in range(4)]
            for _ in range(30):
                versions.add(router.gateway.config.version)
                assert await changed(router, paper, some_file()) is None
                await asyncio.sleep(rng.choice([0.0, 0.02, 0.1]))
            versions.add(router.gateway.config.version)
            is_over = True
            await asyncio.gather(*asking)
            wanted = {
                f"{pool.name}-{number}": url.partition("//")[2]
                for pool in router.gateway.config.pools.values()
                for number, url in enumerate(pool.at)
            }
            cluster = router.gateway.cluster
            await eventually(
                lambda: {name: cluster.backend(name).address for name in names(router)} == wanted, within_s=20
            )
            await eventually(lambda: not cluster._replaced)
            await eventually(lambda: {bare(each) for each in there if each.connections()} <= set(wanted.values()))
        lost = [(status, text) for status, _, text in answers if status != 200 or "[DONE]" not in text]
        assert not lost, f"{len(lost)} of {len(answers)} requests were lost: {lost[0]}"
        assert not any(upstream.open_requests for upstream in there)
    decided = [record.config for _, record in records_of(log)]
    assert len(decided) == len(answers) > 30
    assert 15 < len(set(decided)) <= len(versions)
    assert set(decided) <= versions
