"""FastChat's controller for its workers, at the admin port: workers register here, send heart beats, and get requests.

Start a worker with `--controller-address http://any:KEY@router:9000`; it then belongs to a pool of kind `fastchat`
until it has sent no heart beat for 90 s.

Source: FastChat 0.2.36, its controller's HTTP API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from backends.nesting import decode_json
from http1.request import Handler, Request, Response
from policies.errors import InvalidRequest
from router.fleet.pools import PoolsInForce
from router.protocols.http.body import read_small_body
from router.protocols.http.routes import Routes
from router.protocols.registration.announced import address_in, pool_for, pools_of_kind
from router.protocols.registration.fastchat_workers import Worker, Workers

_STATUS_S = 5.0


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
"""(a worker's address) -> its status; None if it does not answer."""


class FastChatPools:
    """A listener of workers that announces them to the pools of kind `fastchat`."""

    def __init__(self, fleet: PoolsInForce) -> None:
        self._fleet = fleet

    def joined(self, worker: Worker) -> None:
        """As WorkerListener. Raises InvalidRequest if there is no pool for it, Overloaded if that pool is full."""
        pool = pool_for(self._fleet, "fastchat", sorted(worker.models))
        address = address_in(pool, worker.address)
        self.left(worker)
        self._fleet.registries[pool.name].register(address)

    def left(self, worker: Worker) -> None:
        for pool in pools_of_kind(self._fleet, "fastchat"):
            self._fleet.registries[pool.name].unregister(address_in(pool, worker.address))

    def holds(self, worker: Worker) -> bool:
        registries, pools = self._fleet.registries, pools_of_kind(self._fleet, "fastchat")
        return any(address_in(pool, worker.address) in registries[pool.name] for pool in pools)


class FastChatController:
    """Serves `workers` to FastChat. `ask` reads the status of a worker that registers without one.

    An async context manager: while it is entered, workers without heart beats are removed every `look_every_s`.
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
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<FastChatController of {self.workers!r}>"

    def add_to(self, routes: Routes) -> None:
        """Add the calls to `routes` of a port that checks keys."""
        routes.add("POST", "/register_worker", self._register)
        routes.add("POST", "/receive_heart_beat", self._beat)
        routes.add("POST", "/refresh_all_workers", self._refresh)
        routes.add("POST", "/get_worker_address", self._address)
        routes.add("POST", "/list_models", self._list(None))
        routes.add("POST", "/list_multimodal_models", self._list(True))
        routes.add("POST", "/list_language_models", self._list(False))
        routes.add("POST", "/worker_get_status", self._status)
        routes.add("GET", "/test_connection", self._test)

    async def __aenter__(self) -> FastChatController:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_STATUS_S))
        self._looking = asyncio.create_task(self._keep_looking(), name="expiry of FastChat workers")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._looking is not None
        assert self._http is not None
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await self._http.close()

    async def _keep_looking(self) -> None:
        while True:
            await self._sleep(self._look_every_s)
            self.workers.expire()

    async def _register(self, request: Request) -> Response:
        registration = await _read(request, _Registration)
        address = registration.worker_name
        if not address.startswith(("http://", "https://")) or len(address) > 500:
            raise InvalidRequest("a worker's name is its URL", hint="http://host:port", param="worker_name")
        status = registration.worker_status or await self._ask(address)
        if status is not None:
            self.workers.register(_worker(registration, status))
        return _json(None)

    async def _refresh(self, request: Request) -> Response:  # noqa: ARG002
        known = tuple(self.workers.known.values())
        statuses = await asyncio.gather(*(self._ask(worker.address) for worker in known))
        for worker, status in zip(known, statuses, strict=True):
            if status is None:
                self.workers.remove(worker.address)
            else:
                registration = _Registration(worker.address, worker.beats, status, worker.is_multimodal)
                self.workers.register(_worker(registration, status))
        return _json(None)

    async def _beat(self, request: Request) -> Response:
        beat = await _read(request, _Beat)
        return _json({"exist": self.workers.beat(beat.worker_name, beat.queue_length)})

    async def _address(self, request: Request) -> Response:
        wanted = await _read(request, _Wanted)
        return _json({"address": self.workers.address_for(wanted.model)})

    def _list(self, multimodal: bool | None) -> Handler:
        async def listed(request: Request) -> Response:  # noqa: ARG001
            return _json({"models": self.workers.models(multimodal=multimodal)})

        return listed

    async def _status(self, request: Request) -> Response:  # noqa: ARG002
        """The sum of all workers' statuses, in the shape of one worker's."""
        all_of_them = self.workers.known.values()
        return _json(
            {
                "model_names": self.workers.models(),
                "speed": sum(worker.speed for worker in all_of_them),
                "queue_length": sum(worker.queue_length for worker in all_of_them),
            }
        )

    async def _test(self, request: Request) -> Response:  # noqa: ARG002
        return _json("success")

    async def _get_status(self, address: str) -> _Status | None:
        assert self._http is not None, "it was entered"
        try:
            async with self._http.post(f"{address}/worker_get_status", allow_redirects=False) as reply:
                if reply.status != 200:
                    return None
                return decode_json(await reply.content.read(1 << 20), _Status)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            # msgspec's errors are ValueErrors
            return None


def _worker(registration: _Registration, status: _Status) -> Worker:
    return Worker(
        registration.worker_name,
        frozenset(status.model_names),
        speed=status.speed,
        queue_length=status.queue_length,
        is_multimodal=registration.multimodal,
        beats=registration.check_heart_beat,
    )


async def _read(request: Request, kind: type[Any]) -> Any:
    """The body as a `kind`. Raises InvalidRequest."""
    try:
        return decode_json(await read_small_body(request), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not a message of a FastChat worker: {error}") from error


def _json(body: Any) -> Response:
    return Response(200, msgspec.json.encode(body), {"Content-Type": "application/json"})
