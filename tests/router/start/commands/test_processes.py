"""Several processes at one address: they start, end and come back together, and none outlives the first.

This is what docs/replicas.md has people type.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from policies.errors import ConfigError
from policies.sla.server import ServerSettings
from router.start.commands import processes
from router.start.commands.processes import Processes, as_process, place_of, require_shareable
from tests.engines.programs import free_ports
from tests.router.parts import a_config
from tests.shards.attached import eventually
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

WRITES_DOWN = """
import os, signal, sys, time
folder = sys.argv[1]
def note(what):
    with open(f"{folder}/{sys.argv[3].replace('/', '-')}", "a") as file:
        file.write(f"{what}\\n")
signal.signal(signal.SIGHUP, lambda *_: note("reload"))
signal.signal(signal.SIGTERM, lambda *_: (note("ended"), os._exit(0)))
note(os.getpid())
sys.stdin.read()
note("orphaned")
"""
FAILS = "raise SystemExit(3)"


def lines(folder: Path, place: str) -> list[str]:
    with suppress(FileNotFoundError):
        return (folder / place).read_text().split()
    return []


async def test_each_process_gets_its_place_and_signals(tmp_path: Path) -> None:
    some = Processes((sys.executable, "-c", WRITES_DOWN, str(tmp_path)), 2, print)
    running = asyncio.create_task(some.run())
    await eventually(lambda: all(lines(tmp_path, place) for place in ("0-2", "1-2")))
    some.pass_on(signal.SIGHUP)
    await eventually(lambda: all("reload" in lines(tmp_path, place) for place in ("0-2", "1-2")))
    some.pass_on(signal.SIGTERM)
    await asyncio.wait_for(running, 5)
    assert [lines(tmp_path, place)[-1] for place in ("0-2", "1-2")] == ["ended", "ended"]
    assert not some.failed


async def test_one_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SETTLED_S", 0.0)
    monkeypatch.setattr(processes, "PAUSE_S", 0.01)
    logged: list[str] = []
    some = Processes((sys.executable, "-c", WRITES_DOWN, str(tmp_path)), 1, logged.append)
    running = asyncio.create_task(some.run())
    await eventually(lambda: bool(lines(tmp_path, "0-1")))
    os.kill(int(lines(tmp_path, "0-1")[0]), signal.SIGKILL)
    await eventually(lambda: len(lines(tmp_path, "0-1")) == 2)
    some.pass_on(signal.SIGTERM)
    await asyncio.wait_for(running, 5)
    assert logged == ["process 0 ended with -9 and is restarted"]


async def test_one_that_ends_as_soon_as_it_began_ends_all() -> None:
    logged: list[str] = []
    some = Processes((sys.executable, "-c", FAILS), 2, logged.append)
    await asyncio.wait_for(some.run(), 10)
    assert some.failed
    assert any(line.endswith("ended with 3 right after its start") for line in logged)


async def test_one_that_is_killed_as_soon_as_it_began_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PAUSE_S", 0.01)
    some = Processes((sys.executable, "-c", WRITES_DOWN, str(tmp_path)), 2, print)
    running = asyncio.create_task(some.run())
    await eventually(lambda: all(lines(tmp_path, place) for place in ("0-2", "1-2")))
    os.kill(int(lines(tmp_path, "0-2")[0]), signal.SIGKILL)
    await eventually(lambda: len(lines(tmp_path, "0-2")) == 2)
    assert len(lines(tmp_path, "1-2")) == 1
    some.pass_on(signal.SIGTERM)
    await asyncio.wait_for(running, 10)
    assert not some.failed


def test_a_process_has_an_admin_port_of_its_own_and_its_part_of_the_limits() -> None:
    config = replace(a_config(), server=ServerSettings(admin="127.0.0.1:9000"))
    assert as_process(config, 2, 4).server.admin == "127.0.0.1:9002"
    assert as_process(config, 2, 4).store.replicas == 4


def test_a_process_uses_the_store_of_their_own_only_if_it_is_given_one() -> None:
    config = replace(a_config(), server=ServerSettings(keys_file="/keys"))
    own = as_process(config, 0, 2, "unix:///tmp/x/redis.sock")
    assert (own.store.redis, own.store.journal, own.store.replicas) == ("unix:///tmp/x/redis.sock", "/tmp/x/owed", 2)
    # keys stay in the file, which a single process has too
    assert own.server.keys_file == "/keys"
    assert as_process(config, 0, 2).store.redis is None


@pytest.mark.parametrize("wrong", ["", "1", "2/2", "a/3", "-1/2"])
def test_an_invalid_place_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        place_of(wrong)


def test_a_port_that_the_kernel_chooses_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match=r"server\.http is 127\.0\.0\.1:0"):
        require_shareable(a_config())


def test_processes_that_would_mingle_their_lines_are_refused() -> None:
    ports: dict[str, Any] = {"http": "127.0.0.1:1", "grpc": "127.0.0.1:2"}
    require_shareable(a_config(decision_log="decisions.jsonl", **ports))
    with pytest.raises(ConfigError, match=r"mix their decisions on standard output \(name a file"):
        require_shareable(a_config(decision_log="-", **ports))


def test_each_process_logs_decisions_to_a_file_of_its_own() -> None:
    for log, own in (("/log/decisions.jsonl", "/log/decisions-1.jsonl"), ("decisions", "decisions-1")):
        assert as_process(a_config(decision_log=log), 1, 2).server.decision_log == own
    assert as_process(a_config(), 1, 2).server.decision_log is None


FILE = """
pools: {{own: {{kind: openai_compatible, at: ["http://127.0.0.1:1"]}}}}
server: {{http: "127.0.0.1:{http}", grpc: "127.0.0.1:{grpc}", admin: "127.0.0.1:{admin}"}}
"""


@contextmanager
def served(tmp_path: Path, ports: dict[str, int]) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "sla.yaml").write_text(FILE.format(**ports))
    command = [sys.executable, "-P", "-m", "router", "serve", str(tmp_path / "sla.yaml"), "--processes", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=Path(__file__).parents[4])
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answers(url: str) -> bool:
    # a connection to a free port may reach itself
    with suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=2) as reply:
        return bool(reply.status == 200)
    return False


async def test_two_routers_serve_one_port_and_end_together(tmp_path: Path) -> None:
    http, grpc, admin = free_ports(3)
    with served(tmp_path, {"http": http, "grpc": grpc, "admin": admin}) as parent:
        urls = [f"http://127.0.0.1:{http}/healthz", *(f"http://127.0.0.1:{admin + n}/metrics" for n in (0, 1))]
        deadline = time.monotonic() + 90  # three interpreters start, on a machine that may be busy
        while not all([await asyncio.to_thread(answers, url) for url in urls]):
            assert time.monotonic() < deadline, "they do not listen"
            assert parent.poll() is None, parent.communicate()
            # asked without a pause, a port without a listener is soon taken by the question itself
            await asyncio.sleep(0.1)
        parent.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(parent.communicate, timeout=20)
        assert parent.returncode == 0, errors
        assert not answers(urls[0])


async def test_one_that_ran_for_a_while_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SETTLED_S", 0.0)
    monkeypatch.setattr(processes, "PAUSE_S", 3600.0)
    some = Processes((sys.executable, "-c", WRITES_DOWN, str(tmp_path)), 1, print)
    running = asyncio.create_task(some.run())
    await eventually(lambda: bool(lines(tmp_path, "0-1")))
    os.kill(int(lines(tmp_path, "0-1")[0]), signal.SIGKILL)
    await eventually(lambda: len(lines(tmp_path, "0-1")) == 2)
    some.pass_on(signal.SIGTERM)
    await asyncio.wait_for(running, 5)


SHARED = """
tenants:
  a: {{anonymous: true, limits: {{budget_per_month: 10}}}}
  b: {{}}
cost: {{uncached: 0, cached: 0, output: 1}}
pools: {{own: {{kind: openai_compatible, at: ["{url}"], model: m}}}}
server: {{http: "127.0.0.1:{http}", grpc: off, admin: "127.0.0.1:{admin}", state: {state}}}
"""
"""A request for one token costs a unit, so that ten are admitted."""


@pytest.mark.timeout(240)  # three interpreters start, on a machine that may be busy
async def test_processes_without_a_store_in_the_file_admit_exactly_the_limit_and_share_keys(tmp_path: Path) -> None:
    http, admin = free_ports(2)
    connector = aiohttp.TCPConnector(force_close=True)  # the kernel gives each connection to any process
    async with running(OpenAIServer(text="a")) as engine, aiohttp.ClientSession(connector=connector) as client:
        file = tmp_path / "sla.yaml"
        file.write_text(SHARED.format(url=engine.url, http=http, admin=admin, state=tmp_path / "state"))
        command = [sys.executable, "-P", "-m", "router", "serve", str(file), "--processes", "2"]
        parent = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[4])

        async def ask(key: str | None = None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
            url = f"http://127.0.0.1:{http}/v1/chat/completions"
            async with client.post(url, json=body, headers=headers) as reply:
                return reply.status

        async def until_all(status: int, key: str) -> None:
            async with asyncio.timeout(60):
                while {await ask(key) for _ in range(8)} != {status}:  # noqa: ASYNC110 - of other processes
                    await asyncio.sleep(0.1)

        try:
            async with asyncio.timeout(120):
                while None in [await running_in(client, admin + number) for number in (0, 1)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert sorted([await ask() for _ in range(30)]) == [200] * 10 + [429] * 20
            keys = "http://127.0.0.1:{}/admin/tenants/b/keys"
            async with client.post(keys.format(admin), json={"name": "k"}) as reply:
                issued = await reply.json()
            await until_all(200, issued["key"])
            async with client.delete(f"{keys.format(admin + 1)}/{issued['id']}") as reply:
                assert reply.status == 200
            await until_all(401, issued["key"])
        finally:
            parent.terminate()
            await parent.wait()


STREAMING = """
pools: {{own: {{kind: openai_compatible, at: ["{url}"], model: m, options: {{max_requests: 64}}}}}}
server: {{http: "127.0.0.1:{http}", grpc: off, admin: "127.0.0.1:{admin}"}}
"""


class Stream:
    """A streamed chat: the text that came, and how it ended."""

    def __init__(self) -> None:
        self.text, self.process = "", ""
        self.is_incomplete = False

    async def read(self, client: aiohttp.ClientSession, url: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        try:
            async with client.post(f"{url}/v1/chat/completions", json=body) as reply:
                assert reply.status == 200
                async for data in reply.content.iter_any():
                    self.text += data.decode()
        except aiohttp.ClientPayloadError:
            self.is_incomplete = True

    @property
    def is_whole(self) -> bool:
        return self.text.endswith("data: [DONE]\n\n")


async def running_in(client: aiohttp.ClientSession, admin: int) -> float | None:
    """How many requests of the process with this port are at backends; None if it does not answer."""
    with suppress(aiohttp.ClientError):
        async with client.get(f"http://127.0.0.1:{admin}/metrics", timeout=aiohttp.ClientTimeout(2)) as reply:
            rows = [
                line for line in (await reply.text()).splitlines() if line.startswith("pointsman_backend_in_flight{")
            ]
            return sum(float(line.split()[-1]) for line in rows)
    return None


@pytest.mark.timeout(240)  # six interpreters start, on a machine that may be busy
async def test_a_killed_process_takes_its_own_streams_with_it_and_no_others_and_comes_back(tmp_path: Path) -> None:
    http, admin = free_ports(2)
    engine = OpenAIServer(text="a" * 100, delay_s=0.05)
    async with running(engine), aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
        (tmp_path / "sla.yaml").write_text(STREAMING.format(url=engine.url, http=http, admin=admin))
        command = [sys.executable, "-P", "-m", "router", "serve", str(tmp_path / "sla.yaml"), "--processes", "2"]
        parent = await asyncio.create_subprocess_exec(
            *command, cwd=Path(__file__).parents[4], stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(90):
                while None in [await running_in(client, admin + number) for number in (0, 1)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                # so that the parent takes the process for one that works
                await asyncio.sleep(processes.SETTLED_S)
            streams = [Stream() for _ in range(24)]
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(stream.read(client, f"http://127.0.0.1:{http}"))
                while not all(stream.text for stream in streams):  # noqa: ASYNC110 - of other tasks
                    await asyncio.sleep(0.01)
                before = [await running_in(client, admin + number) for number in (0, 1)]
                os.kill(pid_of(parent.pid, "0/2"), signal.SIGKILL)
                killed_at = time.monotonic()
                fresh = Stream()
                await asyncio.sleep(0.2)
                group.create_task(fresh.read(client, f"http://127.0.0.1:{http}"))
                while await running_in(client, admin) is None:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.05)
                print(f"\nback after {time.monotonic() - killed_at:.2f} s")
            cut = [stream for stream in streams if stream.is_incomplete]
            assert [float(len(cut)), float(24 - len(cut))] == before
            assert 0 < len(cut) < 24
            assert all(stream.is_whole for stream in (*streams, fresh) if not stream.is_incomplete)
            assert not any(stream.is_whole for stream in cut)
            assert [await running_in(client, admin + number) for number in (0, 1)] == [0.0, 0.0]
            assert engine.open_requests == 0
        finally:
            parent.terminate()
            await parent.wait()


def pid_of(parent: int, place: str) -> int:
    """The process at `place`, below `parent`."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if place in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no process at {place}")
