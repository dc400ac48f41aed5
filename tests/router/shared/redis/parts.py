"""Real servers that fail over: behind Sentinels, and as a cluster; and every part of a router that uses a Redis."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

from policies.quota.budget import Charge, Reservation
from router.shared.documents.redis import RedisSets
from router.shared.keys.redis import RedisKeys
from router.shared.once import Once
from router.shared.replicas.feed_relay import RedisRelay
from router.shared.replicas.shelf import RedisShelf
from router.shared.replicas.stream import START, RedisStream
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.redis import RedisStore
from tests.policies.builders import a_descriptor
from tests.router.shared.store.parts import EXECUTABLE

HOST = "127.0.0.1"
_SLOTS = 16_384
_AWAY = (redis.ConnectionError, redis.TimeoutError, redis.ResponseError)


def a_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def a_cluster_port() -> int:
    """A port of a cluster's node: the one 10,000 above it is its bus."""
    while True:
        with suppress(OSError), socket.socket() as bus:
            port = a_port()
            if port < 55_000:
                bus.bind((HOST, port + 10_000))
                return port


class Node:
    """A server at a port of its own, with the command line `options`."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int | None = None,
        config: str | None = None,
        password: str | None = None,
    ) -> None:
        self.port, self._password = port or a_port(), password
        self.folder, self._options, self._config = folder, options, config
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __repr__(self) -> str:
        return f"<Node {self.port}>"

    def start(self) -> None:
        command = [EXECUTABLE]
        if self._config is not None:
            file = self.folder / f"{self.port}.conf"
            file.write_text(f"port {self.port}\nbind {HOST}\ndir {self.folder}\n{self._config}")
            command += [str(file), "--sentinel"]
        else:
            command += ["--port", str(self.port), "--bind", HOST, "--save", "", "--dir", str(self.folder)]
            command += ["--dbfilename", f"{self.port}.rdb", "--repl-diskless-sync", "yes"]
            command += ["--repl-diskless-sync-delay", "0", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with self.admin() as admin:
            until(admin.ping)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def admin(self) -> Iterator[redis.Redis]:
        client = redis.Redis(host=HOST, port=self.port, password=self._password, socket_timeout=5)
        try:
            yield client
        finally:
            client.close()

    def says(self, *command: str) -> Any:
        with self.admin() as admin:
            return admin.execute_command(*command)

    def is_primary(self) -> bool:
        with self.admin() as admin:
            return bool(admin.info("replication")["role"] == "master")

    def follow(self, primary: Node | None) -> None:
        self.says("REPLICAOF", *(("NO", "ONE") if primary is None else (HOST, str(primary.port))))
        if primary is not None:
            with self.admin() as admin:
                until(lambda: admin.info("replication").get("master_link_status") == "up")


def until(is_so: Callable[[], object], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        with suppress(*_AWAY):
            if is_so():
                return
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.02)


@dataclass
class Fleet:
    """Servers at one address. `fail_over` gives one of them another's place; each call does it again."""

    url: str
    nodes: list[Node]
    fail_over: Callable[[], None] = lambda: None
    kill_primary: Callable[[], None] = lambda: None


@contextmanager
def nodes_in(folder: str) -> Iterator[tuple[list[Node], Path]]:
    with tempfile.TemporaryDirectory(prefix=folder) as name:
        nodes: list[Node] = []
        try:
            yield nodes, Path(name)
        finally:
            for node in nodes:
                node.kill()


@contextmanager
def sentinels(count: int = 3, password: str | None = None) -> Iterator[Fleet]:
    """A primary, a replica, and `count` Sentinels that call the primary `main`."""
    with nodes_in("sentinels-") as (nodes, folder):
        options = ("--requirepass", password, "--masterauth", password) if password else ()
        servers = [Node(folder, *options, password=password) for _ in range(2)]
        nodes += servers
        servers[1].follow(servers[0])
        config = f"sentinel monitor main {HOST} {servers[0].port} {count // 2 + 1}\n"
        config += "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        if password:
            config += f"sentinel auth-pass main {password}\n"
        guards = [Node(folder, config=config) for _ in range(count)]
        nodes += guards

        def primary() -> int:
            return int(guards[0].says("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")[1])

        def is_ready() -> bool:
            with guards[0].admin() as admin:
                state = admin.sentinel_master("main")
            return (state["num-slaves"], state["num-other-sentinels"]) == (1, count - 1)

        def fail_over() -> None:
            before = primary()
            until(is_ready)
            until(lambda: guards[0].says("SENTINEL", "FAILOVER", "main"))
            until(lambda: primary() != before)

        def kill_primary() -> None:
            until(is_ready)
            next(node for node in servers if node.port == primary()).kill()

        hosts = ",".join(f"{HOST}:{guard.port}" for guard in guards)
        user = f":{quote(password, safe='')}@" if password else ""
        until(is_ready)
        yield Fleet(f"redis+sentinel://{user}{hosts}/main", nodes, fail_over, kill_primary)


@contextmanager
def a_cluster(primaries: int = 3, *, replicas: bool = False, timeout_ms: int = 700) -> Iterator[Fleet]:
    """A cluster of `primaries`, each with a replica or without one."""
    with nodes_in("cluster-") as (nodes, folder):
        for _ in range(primaries * (1 + replicas)):
            port = a_cluster_port()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(timeout_ms))
            nodes.append(Node(folder, *options, "--cluster-config-file", f"{port}.nodes", port=port))
        for number, node in enumerate(nodes[:primaries]):
            first, last = (_SLOTS * edge // primaries for edge in (number, number + 1))
            node.says("CLUSTER", "ADDSLOTS", *map(str, range(first, last)))
            node.says("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for node in nodes[1:]:
            node.says("CLUSTER", "MEET", HOST, str(nodes[0].port))
        for node in nodes:
            with node.admin() as admin:
                until(lambda admin=admin: len(admin.cluster("NODES")) == len(nodes))
        for primary, replica in zip(nodes, nodes[primaries:], strict=False):
            name = primary.says("CLUSTER", "MYID").decode()
            until(lambda replica=replica, name=name: replica.says("CLUSTER", "REPLICATE", name))
        for node in nodes:
            with node.admin() as admin:
                until(lambda admin=admin: admin.cluster("INFO")["cluster_state"] == "ok")
        for replica in nodes[primaries:]:
            with replica.admin() as admin:
                until(lambda admin=admin: admin.info("replication").get("master_link_status") == "up")

        def fail_over() -> None:
            for node in nodes[primaries:]:
                if not node.is_primary():
                    node.says("CLUSTER", "FAILOVER")
                    until(node.is_primary)

        def kill_primary() -> None:
            nodes[0].kill()

        hosts = ",".join(f"{HOST}:{node.port}" for node in nodes)
        yield Fleet(f"redis+cluster://{hosts}", nodes, fail_over, kill_primary)


LIMITED = [a_descriptor(f"tenant-{number}", requests_per_minute=1_000_000) for number in range(8)]


@dataclass
class Users:
    """Every part of a router that uses a Redis. `asked` is what became of each of them in one round of calls."""

    url: str
    prefix: str = "{pointsman}"
    events: Counter[str] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        # a busy machine makes no Redis slow
        options = GuardOptions(strict=True, deadline_s=5.0, first_backoff_s=0.02, most_backoff_s=0.2)
        self.quotas = GuardedStore(
            RedisStore(self.url), clock=time.time, options=options, on_event=lambda event: self.events.update([event])
        )
        self.keys = RedisKeys(self.url, key=f"{self.prefix}:keys")
        self.sets = RedisSets(self.url, prefix=f"{self.prefix}:")
        self.once = Once(self.url, prefix=f"{self.prefix}:once:")
        self.relay = RedisRelay(self.url, prefix=f"{self.prefix}:feeds:")
        self.stream = RedisStream(self.url, "me", key=f"{self.prefix}:replicas")
        self.shelf = RedisShelf(self.url, key=f"{self.prefix}:replicas:snapshot")

    async def _quota(self) -> None:
        for descriptor in LIMITED:
            reservation = await self.quotas.reserve(
                Reservation(f"r{next(self._numbers)}", (descriptor,), Charge(requests=1))
            )
            assert isinstance(reservation, Reservation)
            self.quotas.settle(reservation, Charge(requests=1))

    async def _first(self) -> None:
        name = str(next(self._numbers))
        await self.once.is_first(name)
        assert not await self.once.is_first(name), "Redis was away"

    async def _snapshot(self) -> None:
        await self.shelf.claim("me", 0.001)
        await self.shelf.append("draft", [b"piece"])
        await self.shelf.publish("draft", b"header", "me")
        assert await self.shelf.header() == b"header"

    async def _told(self) -> None:
        found = await self.stream.exchange([b"news"], START)
        assert found.unwritten is None, found.unwritten
        assert found.entries

    async def _document(self) -> None:
        assert await self.sets.leads("me", 0.001) is not None
        await self.sets.all()

    async def asked(self) -> dict[str, BaseException | None]:
        """What each user's call raises; None: it was done."""
        calls = {
            "quotas": self._quota(),
            "keys": self.keys.change(lambda book: book),
            "documents": self._document(),
            "once": self._first(),
            "feeds": self._fed(),
            "news": self._told(),
            "snapshot": self._snapshot(),
        }
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        return {
            name: result if isinstance(result, BaseException) else None
            for name, result in zip(calls, results, strict=True)
        }

    async def _fed(self) -> None:
        token = await self.relay.claim("feed", "me", 60.0)
        assert token is not None
        await self.relay.publish("feed", token, b"[]")

    async def work_again(self, within_s: float = 20.0) -> None:
        """All of them, twice in a row."""
        deadline, rounds = time.monotonic() + within_s, 0
        while rounds < 2:
            failed = {name: error for name, error in (await self.asked()).items() if error is not None}
            rounds = 0 if failed else rounds + 1
            assert time.monotonic() < deadline, f"{failed}, {self.quotas!r}"
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for part in (self.quotas, self.keys, self.sets, self.once, self.relay, self.stream, self.shelf):
            await part.close()


@asynccontextmanager
async def users(url: str, prefix: str = "{pointsman}") -> AsyncIterator[Users]:
    found = Users(url, prefix)
    await found.quotas.start()
    try:
        yield found
    finally:
        await found.close()
        found.quotas.check()
