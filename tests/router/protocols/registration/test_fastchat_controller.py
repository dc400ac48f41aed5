from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from http1.request import Reply, Request
from http1.server import HttpServer
from policies.errors import InvalidRequest, Overloaded
from router.protocols.http.routes import Routes
from router.protocols.registration.fastchat_controller import FastChatController
from router.protocols.registration.fastchat_workers import MOST_WORKERS, Worker, Workers
from tests.shards.attached import eventually
from tests.standins.fastchat import FastChatWorker
from tests.standins.standin import running


class Heard:
    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self.forgot: set[str] = set()

    def holds(self, worker: Worker) -> bool:
        return worker.address not in self.forgot

    def joined(self, worker: Worker) -> None:
        self.changes.append(("joined", worker.address))

    def left(self, worker: Worker) -> None:
        self.changes.append(("left", worker.address))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def some_workers() -> tuple[Workers, Heard, Clock]:
    heard, clock = Heard(), Clock()
    return Workers(heard, clock), heard, clock


def a_worker(address: str = "http://w:1", *models: str, **fields: Any) -> Worker:
    return Worker(address, frozenset(models or ("m",)), **fields)


def a_registration(address: str = "http://w:1", **fields: Any) -> dict[str, Any]:
    status = {"model_names": ["m"], "speed": 1, "queue_length": 0}
    return {"worker_name": address, "check_heart_beat": True, "worker_status": status, "multimodal": False, **fields}


@asynccontextmanager
async def a_controller() -> AsyncIterator[tuple[aiohttp.ClientSession, Workers, Heard]]:
    workers, heard, _ = some_workers()
    routes = Routes()

    async def answer(request: Request) -> Reply:
        return await (routes.at(request.path) or {})[request.method](request)

    async with FastChatController(workers) as controller:
        controller.add_to(routes)
        server = HttpServer(answer)
        port = await server.listen("127.0.0.1", 0)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield client, workers, heard
        workers.check()
        await server.close()


async def posted(client: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with client.post(path, json=body) as reply:
        assert reply.status == 200
        return await reply.json()


def test_a_registered_worker_has_joined_once_until_its_models_change() -> None:
    workers, heard, _ = some_workers()
    workers.register(a_worker())
    workers.register(a_worker(queue_length=3))
    assert heard.changes == [("joined", "http://w:1")]
    workers.register(a_worker("http://w:1", "m", "n"))
    assert heard.changes == [("joined", "http://w:1")] * 2
    assert workers.models() == ["m", "n"]


def test_a_worker_without_heart_beats_is_gone_and_must_register_again() -> None:
    workers, heard, clock = some_workers()
    workers.register(a_worker("http://beats:1"))
    workers.register(a_worker("http://silent:1"))
    workers.register(a_worker("http://exempt:1", beats=False))
    clock.now = 90.0
    assert workers.beat("http://beats:1", 2)
    clock.now += 1
    workers.expire()
    assert heard.changes[-1] == ("left", "http://silent:1")
    assert set(workers.known) == {"http://beats:1", "http://exempt:1"}
    assert not workers.beat("http://silent:1", 0)
    workers.check()


def test_the_shortest_queue_for_its_speed_is_next_and_counts_as_one_longer() -> None:
    workers, _, _ = some_workers()
    workers.register(a_worker("http://slow:1", speed=1, queue_length=1))
    workers.register(a_worker("http://fast:1", speed=4, queue_length=2))
    assert [workers.address_for("m") for _ in range(4)] == ["http://fast:1"] * 2 + ["http://slow:1", "http://fast:1"]
    assert workers.address_for("nobody's") == ""


def test_the_number_of_workers_is_limited_and_known_ones_may_register_again() -> None:
    workers, _, _ = some_workers()
    for at in range(MOST_WORKERS):
        workers.register(a_worker(f"http://w:{at}"))
    workers.register(a_worker("http://w:0"))
    with pytest.raises(Overloaded):
        workers.register(a_worker("http://one-more:1"))


def test_a_forgotten_worker_must_register_again_despite_its_heart_beats() -> None:
    workers, heard, _ = some_workers()
    workers.register(a_worker())
    heard.forgot.add("http://w:1")
    assert not workers.beat("http://w:1", 0)
    workers.check()
    heard.forgot.clear()
    workers.register(a_worker())
    assert heard.changes[-1] == ("joined", "http://w:1")
    assert workers.beat("http://w:1", 0)


async def test_a_worker_registers_beats_and_is_found() -> None:
    async with a_controller() as (client, _, heard):
        assert await posted(client, "/register_worker", **a_registration()) is None
        assert await posted(client, "/receive_heart_beat", worker_name="http://w:1", queue_length=2) == {"exist": True}
        assert await posted(client, "/receive_heart_beat", worker_name="http://x:1", queue_length=0) == {"exist": False}
        assert await posted(client, "/list_models") == {"models": ["m"]}
        assert await posted(client, "/list_multimodal_models") == {"models": []}
        assert await posted(client, "/list_language_models") == {"models": ["m"]}
        assert await posted(client, "/get_worker_address", model="m") == {"address": "http://w:1"}
        assert await posted(client, "/worker_get_status") == {"model_names": ["m"], "speed": 1, "queue_length": 3}
        async with client.get("/test_connection") as reply:
            assert await reply.json() == "success"
    assert heard.changes == [("joined", "http://w:1")]


async def test_a_worker_without_a_status_is_asked_for_it_and_refreshing_asks_all() -> None:
    async with a_controller() as (client, workers, heard), running(FastChatWorker(waiting=3)) as worker:
        await posted(client, "/register_worker", worker_name=worker.url, check_heart_beat=False)
        assert workers.known[worker.url].queue_length == 3
        worker.waiting = 5
        await posted(client, "/refresh_all_workers")
        assert workers.known[worker.url].queue_length == 5
        worker.is_ill = True
        await posted(client, "/refresh_all_workers")
        assert heard.changes == [("joined", worker.url), ("left", worker.url)]


async def test_a_worker_that_does_not_answer_is_not_registered() -> None:
    async with a_controller() as (client, workers, _):
        await posted(client, "/register_worker", worker_name="http://127.0.0.1:1", check_heart_beat=True)
        assert workers.known == {}


async def test_the_controller_looks_for_those_that_went_silent() -> None:
    ticks: asyncio.Queue[None] = asyncio.Queue()

    async def tick(_: float) -> None:
        await ticks.get()

    workers, heard, clock = some_workers()
    async with FastChatController(workers, sleep=tick):
        workers.register(a_worker())
        clock.now = 91.0
        ticks.put_nowait(None)
        await eventually(lambda: not workers.known)
    assert heard.changes[-1] == ("left", "http://w:1")


def test_a_worker_that_the_listener_refuses_is_not_known() -> None:
    class Unwelcoming(Heard):
        def joined(self, worker: Worker) -> None:
            raise InvalidRequest("no pool takes it")

    workers = Workers(Unwelcoming(), Clock())
    with pytest.raises(InvalidRequest):
        workers.register(a_worker())
    assert workers.known == {}
    workers.check()
