"""Scale from zero: a request that needs a pool without a backend waits while a hook starts one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from policies.errors import ConfigError
from policies.sla.parse import parse
from router.shared.webhook import webhook_headers
from router.start.app import Router
from tests.backends.upstream import an_upstream
from tests.engines.programs import ROOT, free_ports
from tests.shards.attached import eventually

CHAT = "/v1/chat/completions"
SERVER = "server: {http: '127.0.0.1:0', grpc: off, admin: '127.0.0.1:0', drain: 1s}\n"
HEALTH = "health: {probe_every: 50ms, retry: 50ms}"


def a_file(pool: str, more: str = "classes: {chat: {}}\n") -> str:
    return f"{more}tenants: {{acme: {{anonymous: true}}}}\npools: {{{pool}}}\n{SERVER}"


@dataclass
class Hook:
    """Receives the POSTs of routers, and answers `status`."""

    status: int = 200
    received: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.received.append((await request.read(), {name.lower(): text for name, text in request.headers.items()}))
        self.came.set()
        return web.Response(status=self.status)


@asynccontextmanager
async def a_hook(status: int = 200) -> AsyncIterator[Hook]:
    hook, app = Hook(status), web.Application()
    app.router.add_post("/wake", hook.answer)
    server = TestServer(app)
    await server.start_server()
    hook.url = str(server.make_url("/wake"))
    try:
        yield hook
    finally:
        await server.close()


@asynccontextmanager
async def a_router(text: str) -> AsyncIterator[Router]:
    async with Router(parse(text, environment={"SECRET": "s3cret"})) as router:
        yield router
        await eventually(lambda: not router.gateway.doors.inside)
        router.check()


async def asked(router: Router, **more: Any) -> tuple[int, dict[str, str], str]:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **more}
    async with aiohttp.ClientSession() as http, http.post(f"{router.http_url}{CHAT}", json=body) as reply:
        return reply.status, {name.lower(): text for name, text in reply.headers.items()}, await reply.text()


def waiting(router: Router) -> float:
    return router.telemetry.registry.get_sample_value("pointsman_pool_waiting", {"pool": "own"}) or 0.0


async def announce(router: Router, address: str) -> None:
    body = {"pool": "own", "address": address, "ttl_s": 60}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://{router.admin}/backends/register", json=body) as reply,
    ):
        assert reply.status < 300, await reply.text()


async def test_the_first_request_is_answered_by_a_program_that_a_command_starts(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    started = tmp_path / "started"
    script = tmp_path / "start.py"
    script.write_text(
        "import subprocess, sys\n"
        f"command = [sys.executable, '-m', 'tests.standins.openai_compatible', '--port', '{port}']\n"
        f"process = subprocess.Popen(command, cwd={str(ROOT)!r}, start_new_session=True)\n"
        f"open({str(started)!r}, 'a').write(f'{{process.pid}} {{sys.argv[1]}}\\n')\n"
    )
    wake = f"wake: {{within: 30s, command: ['{sys.executable}', '{script}']}}"
    pool = f"own: {{kind: openai_compatible, at: 'http://127.0.0.1:{port}', model: m, {HEALTH}, {wake}}}"
    try:
        async with a_router(a_file(pool)) as router:
            answers = await asyncio.gather(*(asked(router) for _ in range(5)))
            assert [(status, "[DONE]" in text) for status, _, text in answers] == [(200, True)] * 5, answers[0]
            assert waiting(router) == 0
        (line,) = started.read_text().splitlines()
        assert line.split()[1] == "own"
    finally:
        for line in started.read_text().splitlines() if started.exists() else ():
            os.kill(int(line.split()[0]), signal.SIGTERM)


async def test_a_signed_post_says_which_pool_is_wanted_once_for_all_requests() -> None:
    async with a_hook() as hook, an_upstream() as upstream:
        wake = f"wake: {{within: 20s, url: '{hook.url}', secret: '${{env:SECRET}}'}}"
        pool = f"own: {{kind: openai_compatible, register: true, model: m, {HEALTH}, {wake}}}"
        async with a_router(a_file(pool)) as router:
            asking = [asyncio.create_task(asked(router)) for _ in range(3)]
            await hook.came.wait()
            await eventually(lambda: waiting(router) == 3)
            await announce(router, upstream.url)
            assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
            assert waiting(router) == 0
        ((body, headers),) = hook.received
        assert json.loads(body)["type"] == "pool.wake"
        assert json.loads(body)["pool"] == "own"
        signed = webhook_headers(headers["webhook-id"], body, "s3cret", int(headers["webhook-timestamp"]))
        assert headers["webhook-signature"] == signed["webhook-signature"]


async def test_a_pool_that_does_not_start_in_time_is_a_503_with_a_time_to_retry() -> None:
    async with a_hook() as hook:
        wake = f"wake: {{within: 200ms, url: '{hook.url}'}}"
        pool = f"own: {{kind: openai_compatible, register: true, model: m, {wake}}}"
        async with a_router(a_file(pool)) as router:
            status, headers, text = await asked(router)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "no backend of model 'm' has started within 200 ms" in text
            assert "it may still start: try again" in text
            assert (await asked(router, model="other"))[0] in (404, 503)
        assert len(hook.received) == 1


async def test_a_hook_that_fails_is_tried_again_while_requests_wait(caplog: pytest.LogCaptureFixture) -> None:
    async with a_hook(status=500) as hook, an_upstream() as upstream:
        wake = f"wake: {{within: 20s, url: '{hook.url}'}}"
        pool = f"own: {{kind: openai_compatible, register: true, model: m, {HEALTH}, {wake}}}"
        async with a_router(a_file(pool)) as router:
            router.gateway.waking._waits_s = (0.01,)
            asking = asyncio.create_task(asked(router))
            await eventually(lambda: len(hook.received) > 2)
            hook.status = 200
            await announce(router, upstream.url)
            assert (await asking)[0] == 200
        assert "pool own could not be started: status 500" in caplog.text


@pytest.mark.parametrize("command", ["['/not/there']", "['false']"])
async def test_a_command_that_fails_is_reported(command: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = f"own: {{kind: openai_compatible, register: true, model: m, wake: {{within: 300ms, command: {command}}}}}"
    async with a_router(a_file(pool)) as router:
        assert (await asked(router))[0] == 503
    assert "pool own could not be started" in caplog.text


async def test_a_class_that_sheds_waits_no_longer_than_it_promises() -> None:
    more = "classes: {chat: {ttft_p95: 100ms}}\non_miss: {chat: [{queue: 200ms}, {shed: 503}]}\n"
    pool = "own: {kind: openai_compatible, register: true, model: m, wake: {within: 60s}}"
    async with a_router(a_file(pool, more)) as router:
        status, _, text = await asked(router)
        assert status == 503
        assert "has started within 200 ms" in text


async def test_a_pool_that_had_backends_is_started_again_and_other_pools_are_used_at_once() -> None:
    async with a_hook() as hook, an_upstream() as upstream, an_upstream() as other:
        wake = f"wake: {{within: 20s, url: '{hook.url}'}}"
        own = f"own: {{kind: openai_compatible, register: true, model: m, {HEALTH}, {wake}}}"
        far = f"far: {{kind: openai_compatible, at: '{other.url}', model: m, {HEALTH}}}"
        more = (
            "classes: {chat: {}, fast: {ttft_p95: 1s}}\non_miss: {fast: [{spill: far}]}\n"
            "rules: [{class: fast, pools: own, when: {priority: fast}}, {class: chat, pools: own}]\n"
        )
        async with a_router(a_file(f"{own}, {far}", more)) as router:
            await eventually(lambda: router.gateway.cluster.model("m") is not None)
            # the model is known by another pool, so the request waits in the queue
            asking = asyncio.create_task(asked(router))
            await hook.came.wait()
            assert waiting(router) == 1
            async with aiohttp.ClientSession() as http:
                body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
                headers = {"x-pointsman-priority": "fast"}
                async with http.post(f"{router.http_url}{CHAT}", json=body, headers=headers) as reply:
                    assert (reply.status, reply.headers["x-pointsman-backend"]) == (200, "far-0")
            await announce(router, upstream.url)
            status, headers_, _ = await asking
            assert status == 200
            assert headers_["x-pointsman-backend"].startswith("own@")
        assert len(hook.received) == 1


async def test_a_router_that_stops_ends_hooks_and_waits() -> None:
    pool = "own: {kind: openai_compatible, register: true, model: m, wake: {within: 60s, command: [sleep, '60']}}"
    async with Router(parse(a_file(pool))) as router:
        asking = asyncio.create_task(asked(router))
        await eventually(lambda: bool(router.gateway.waking._hooks))
    assert (await asking)[0] == 503
    assert not router.gateway.waking._hooks


@pytest.mark.parametrize(
    ("wake", "says"),
    [
        ("{}", "has no within"),
        ("{within: soon}", "wake.within"),
        ("{within: 1m, url: nope}", "must be a URL"),
        ("{within: 1m, url: 'http://x', command: y}", "by a URL or by a command, not both"),
        ("{within: 1m, secret: '${env:SECRET}'}", "signs nothing without a url"),
        ("{within: 1m, secret: plain, url: 'http://x'}", "a secret must not stand in the file"),
    ],
)
def test_mistakes_are_named(wake: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(f"pools: {{own: {{kind: vllm, register: true, wake: {wake}}}}}", environment={"SECRET": "x"})
    assert says in str(raised.value)
