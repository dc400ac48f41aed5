"""FastChat's controller, as its workers see it: they register here, beat, and are told to whoever listens.

Start a worker with `--controller-address` of this app and it is known by its models until it has not beaten for 90 s.
Whoever reaches these routes can have requests sent to an address of their choice: serve them to the workers' network
only.

Source: FastChat 0.2.36, its controller's HTTP API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

from policies.errors import InvalidRequest, Overloaded

EXPIRES_AFTER_S = 90.0
"""A worker beats every 45 s."""

MOST_WORKERS = 4096
_STATUS_S = 5.0


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker at `address` (its URL). `queue_length` counts the requests that it has; `speed` is relative."""

    address: str
    models: frozenset[str]
    speed: float = 1.0
    queue_length: int = 0
    is_multimodal: bool = False
    beats: bool = True
    """It sends heart beats, and is gone without them."""


class WorkerListener(Protocol):
    """Hears which workers there are."""

    def joined(self, worker: Worker) -> None:
        """`worker` is new, or now has other models."""
        ...

    def left(self, worker: Worker) -> None:
        """`worker` has not beaten, or no longer answers."""
        ...


class _Status(msgspec.Struct):
    model_names: list[str]
    speed: float = 1.0
    queue_length: int = 0


class _Registration(msgspec.Struct):
    worker_name: str
    check_heart_beat: bool = True
    worker_status: _Status | None = None
    multimodal: bool = False


class _Beat(msgspec.Struct):
    worker_name: str
    queue_length: int = 0


class _Wanted(msgspec.Struct):
    model: str


AskStatus = Callable[[str], Awaitable[_Status | None]]
"""(a worker's address) -> what it says of itself; None if it does not answer."""


@dataclass(slots=True)
class Workers:
    """Who is registered. `clock` is in seconds. `listener` hears of each that comes and goes, once."""

    listener: WorkerListener
    clock: Callable[[], float] = time.monotonic
    known: dict[str, Worker] = field(default_factory=dict)
    beaten_at: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Workers {len(self.known)} of {len(self.models())} models>"

    def register(self, worker: Worker) -> None:
        """`worker` is there. Raises Overloaded if there are too many."""
        before = self.known.get(worker.address)
        if before is None and len(self.known) >= MOST_WORKERS:
            raise Overloaded(f"{MOST_WORKERS} workers are registered already")
        self.known[worker.address] = worker
        self.beaten_at[worker.address] = self.clock()
        if before is None or before.models != worker.models:
            self.listener.joined(worker)

    def beat(self, address: str, queue_length: int) -> bool:
        """Was it known? If not, it will register again."""
        worker = self.known.get(address)
        if worker is None:
            return False
        self.known[address] = replace(worker, queue_length=queue_length)
        self.beaten_at[address] = self.clock()
        return True

    def remove(self, address: str) -> None:
        """It is gone."""
        self.beaten_at.pop(address, None)
        worker = self.known.pop(address, None)
        if worker is not None:
            self.listener.left(worker)

    def expire(self) -> None:
        """Remove those that should have beaten and did not."""
        oldest = self.clock() - EXPIRES_AFTER_S
        for address in [one.address for one in self.known.values() if one.beats]:
            if self.beaten_at[address] < oldest:
                self.remove(address)

    def models(self, *, multimodal: bool | None = None) -> list[str]:
        """Names of models, of all workers or of those that are (not) multimodal."""
        chosen = (one for one in self.known.values() if multimodal is None or one.is_multimodal is multimodal)
        return sorted({name for worker in chosen for name in worker.models})

    def address_for(self, model: str) -> str:
        """Where `model` has the shortest queue for its speed; empty if nowhere. It is counted as one longer."""
        serving = [worker for worker in self.known.values() if model in worker.models and worker.speed > 0]
        if not serving:
            return ""
        chosen = min(serving, key=lambda worker: worker.queue_length / worker.speed)
        self.known[chosen.address] = replace(chosen, queue_length=chosen.queue_length + 1)
        return chosen.address

    def check(self) -> None:
        """Raise AssertionError if a worker's beats were lost count of."""
        assert self.known.keys() == self.beaten_at.keys(), "a worker has no time, or a time no worker"


class FastChatController:
    """Serves `workers` to FastChat. `ask` reads the status of a worker that registers without one.

    Workers that do not beat expire while the app runs, looked at every `look_every_s`.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        ask: AskStatus | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        look_every_s: float = 10.0,
    ) -> None:
        self.workers = workers
        self._ask, self._sleep, self._look_every_s = ask or self._get_status, sleep, look_every_s
        self._http: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<FastChatController of {self.workers!r}>"

    def app(self) -> web.Application:
        """The application, to be run on an address of its own."""
        app = web.Application(middlewares=[_errors], client_max_size=1 << 20)
        app.add_routes(
            [
                web.post("/register_worker", self._register),
                web.post("/receive_heart_beat", self._beat),
                web.post("/refresh_all_workers", self._refresh),
                web.post("/get_worker_address", self._address),
                web.post("/list_models", self._list(None)),
                web.post("/list_multimodal_models", self._list(True)),
                web.post("/list_language_models", self._list(False)),
                web.post("/worker_get_status", self._status),
                web.get("/test_connection", self._test),
            ]
        )
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_STATUS_S))
        looking = asyncio.create_task(self._keep_looking(), name="expiry of FastChat workers")
        yield
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await self._http.close()

    async def _keep_looking(self) -> None:
        while True:
            await self._sleep(self._look_every_s)
            self.workers.expire()

    async def _register(self, request: web.Request) -> web.Response:
        said = await _read(request, _Registration)
        address = said.worker_name
        if not address.startswith(("http://", "https://")) or len(address) > 500:
            raise InvalidRequest("a worker's name is its URL", hint="http://host:port", param="worker_name")
        status = said.worker_status or await self._ask(address)
        if status is not None:
            self.workers.register(_worker(said, status))
        return web.json_response(None)

    async def _refresh(self, request: web.Request) -> web.Response:  # noqa: ARG002
        known = tuple(self.workers.known.values())
        statuses = await asyncio.gather(*(self._ask(worker.address) for worker in known))
        for worker, status in zip(known, statuses, strict=True):
            if status is None:
                self.workers.remove(worker.address)
            else:
                said = _Registration(worker.address, worker.beats, status, worker.is_multimodal)
                self.workers.register(_worker(said, status))
        return web.json_response(None)

    async def _beat(self, request: web.Request) -> web.Response:
        said = await _read(request, _Beat)
        return web.json_response({"exist": self.workers.beat(said.worker_name, said.queue_length)})

    async def _address(self, request: web.Request) -> web.Response:
        said = await _read(request, _Wanted)
        return web.json_response({"address": self.workers.address_for(said.model)})

    def _list(self, multimodal: bool | None) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def listed(request: web.Request) -> web.Response:  # noqa: ARG001
            return web.json_response({"models": self.workers.models(multimodal=multimodal)})

        return listed

    async def _status(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """All workers as if they were one."""
        all_of_them = self.workers.known.values()
        return web.json_response(
            {
                "model_names": self.workers.models(),
                "speed": sum(worker.speed for worker in all_of_them),
                "queue_length": sum(worker.queue_length for worker in all_of_them),
            }
        )

    async def _test(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response("success")

    async def _get_status(self, address: str) -> _Status | None:
        assert self._http is not None, "the app runs"
        try:
            async with self._http.post(f"{address}/worker_get_status", allow_redirects=False) as reply:
                if reply.status != 200:
                    return None
                return msgspec.json.decode(await reply.content.read(1 << 20), type=_Status)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            return None


def _worker(said: _Registration, status: _Status) -> Worker:
    return Worker(
        said.worker_name,
        frozenset(status.model_names),
        speed=status.speed,
        queue_length=status.queue_length,
        is_multimodal=said.multimodal,
        beats=said.check_heart_beat,
    )


async def _read(request: web.Request, kind: type[Any]) -> Any:
    """The body as a `kind`. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not what a FastChat worker sends: {error}") from error


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """FastChat has no errors of its own here: its workers look at the status alone."""
    try:
        return await handler(request)
    except InvalidRequest as error:
        return web.json_response({"detail": str(error)}, status=400)
    except Overloaded as error:
        return web.json_response({"detail": str(error)}, status=503)
