"""Random changes of the SLA file under load: no request may be lost, no connection may be left.

    python benchmarks/config_soak.py [--changes 200] [--clients 16] [--seed 1]

`pointsman serve` follows a file that is rewritten at random: pools come, go, and change their addresses, keys, kinds
and limits; rules, shares, classes, tenants and limits change with them; one change in ten is a file with a mistake,
which must be refused. Three of four changes are read by POST /admin/reload, the others by the router's own look at the
file. Six engines, in a process of their own, stream answers of 2 to 40 events. Clients of OpenAI's and Anthropic's
dialect ask all the time.

Exits with 1 if a request was not answered whole, if a decision names a version of the file that was not in effect while
its request was there, or if, with the first file in effect again, an engine that it does not name has a connection, the
router has more descriptors or tasks than at the beginning, or a gauge of requests is not zero.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from router.operate.telemetry.decision_reader import records_of
from tests.engines.programs import Program, free_ports

KEY = "a-key-of-the-soak-only"
DIGEST = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
ENGINES = 6
SETTLES_S = 3.0
"""A request that arrived this long after a file took effect must not be decided by the one before."""


async def engines(ports: list[int]) -> None:
    """Engines at `ports`; a line on stdin is answered with the open connections of each."""
    runners = []
    for port in ports:
        app = web.Application()
        app.add_routes(
            [web.post("/v1/chat/completions", _chat), web.get("/v1/models", _models), web.get("/health", _well)]
        )
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        runners.append(runner)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps([len(runner.server.connections) if runner.server else 0 for runner in runners]), flush=True)


async def _chat(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "whole"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        return web.json_response({"id": "a", "model": asked["model"], "choices": [choice], "usage": usage})
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    for at in range(asked["max_tokens"]):
        piece = {"index": 0, "delta": {"content": f"{at} "}, "finish_reason": None}
        await reply.write(b"data: %s\n\n" % json.dumps({"id": "a", "model": "m", "choices": [piece]}).encode())
        await asyncio.sleep(0.02)
    end = {"id": "a", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    await reply.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(end).encode())
    return reply


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def _well(_: web.Request) -> web.Response:
    return web.Response()


@dataclass
class Files:
    """Random files in front of engines at `ports`, for a router at `http` and `admin` with its log at `log`."""

    ports: list[int]
    http: int
    admin: int
    log: Path
    rng: random.Random

    def first(self) -> str:
        """The file of the beginning and the end: one pool with one engine."""
        return self._file({"own": self._pool("openai_compatible", [0], "")}, ["{class: chat}"])

    def some(self) -> str:
        """A sound file."""
        rng = self.rng
        shuffled, pools = rng.sample(range(ENGINES), ENGINES), {}
        for name in rng.sample(["own", "more", "far"], rng.randrange(1, 4)):
            size = rng.randrange(1, 3)
            key = rng.choice(["", ", key: '${env:FIRST_KEY}'", ", key: '${env:SECOND_KEY}'"])
            options = rng.choice(["", ", options: {max_requests: 32}", ", options: {max_requests: 500}"])
            health = rng.choice([", health: {probe_every: 200ms}", ", health: {probe_every: 1s, failures: 9}"])
            kind = rng.choice(["openai_compatible", "openai_compatible", "vllm"])
            pools[name] = self._pool(kind, shuffled[:size], key + health + ("" if kind == "vllm" else options))
            del shuffled[:size]
        names = list(pools)
        rules = [f"{{class: {rng.choice(['chat', 'slow'])}, when: {{stream: 'true'}}}}"] if rng.random() < 0.5 else []
        last = rng.choice(["", f", pools: [{', '.join(names)}]"])
        if len(names) > 1 and rng.random() < 0.5:
            last = f", pools: {{{names[0]}: {rng.randrange(50, 99)}, {names[1]}: {rng.randrange(1, 40)}}}"
        return self._file(pools, [*rules, f"{{class: chat{last}}}"])

    def broken(self) -> str:
        """A file with a mistake."""
        slips = (("class: chat", "class: chart"), ("kind:", "kin:"), ("limits:", "limit: "), ("127.0.0.1:", "nowhere"))
        return self.some().replace(*self.rng.choice(slips))

    def _pool(self, kind: str, engines: list[int], more: str) -> str:
        at = ", ".join(f"'http://127.0.0.1:{self.ports[number]}'" for number in engines)
        return f"{{kind: {kind}, at: [{at}], model: m{more}}}"

    def _file(self, pools: dict[str, str], rules: list[str]) -> str:
        rng = self.rng
        listed = "".join(f"  {name}: {pool}\n" for name, pool in pools.items())
        ruled = "".join(f"  - {rule}\n" for rule in rules)
        limit, weight = rng.choice([1_000_000, 2_000_000, 9_000_000]), rng.randrange(1, 9)
        target = rng.choice(["2s", "20s"])
        return (
            f"# {rng.random()}\n"
            f"classes: {{chat: {{ttft_p95: {target}}}, slow: {{}}}}\n"
            f"tenants: {{acme: {{keys: ['{DIGEST}'], weight: {weight}, limits: {{requests_per_minute: {limit}}}}}}}\n"
            f"pools:\n{listed}rules:\n{ruled}"
            f"server: {{http: '127.0.0.1:{self.http}', grpc: off, admin: '127.0.0.1:{self.admin}', drain: 10s, "
            f"decision_log: {self.log}, state: off}}\n"
        )


@dataclass
class Clients:
    """They ask until `is_over`; `ended` counts by dialect, `lost` has what was not answered whole."""

    url: str
    rng: random.Random
    is_over: bool = False
    ended: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)

    async def ask_on(self, number: int) -> None:
        """One request after the other, half of them in one session."""
        async with aiohttp.ClientSession() as http:
            while not self.is_over:
                await self._ask(http, number)

    async def _ask(self, http: aiohttp.ClientSession, number: int) -> None:
        rng, dialect = self.rng, self.rng.choice(["chat", "stream", "stream", "messages"])
        path = "/v1/messages" if dialect == "messages" else "/v1/chat/completions"
        words = " ".join(str(rng.randrange(1000)) for _ in range(rng.choice([3, 300])))
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": words}]}
        body |= {"max_tokens": rng.randrange(2, 40), "stream": dialect != "chat"}
        headers = {"authorization": f"Bearer {KEY}"} | ({"x-pointsman-session": f"s{number}"} if number % 2 else {})
        end = {"chat": "whole", "stream": "[DONE]", "messages": "message_stop"}[dialect]
        try:
            async with http.post(self.url + path, json=body, headers=headers) as reply:
                text = await reply.text()
                if reply.status != 200 or end not in text:
                    self.lost.append(f"{dialect}: {reply.status} {text[-300:]}")
        except aiohttp.ClientError as error:
            self.lost.append(f"{dialect}: {error!r}")
        self.ended[dialect] += 1


@dataclass
class Held:
    """What the router's process has, and the connections at each engine."""

    descriptors: int
    mib: float
    engines: list[int]


@dataclass
class Soak:
    """The running programs, and the file's history: each version with when it took effect."""

    files: Files
    sla: Path
    router: Program
    serving: subprocess.Popen[bytes]
    history: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: int = 0

    def held(self) -> Held:
        assert self.serving.stdin is not None
        assert self.serving.stdout is not None
        self.serving.stdin.write(b"\n")
        self.serving.stdin.flush()
        folder = Path(f"/proc/{self.router.pid}")
        mib = int((folder / "statm").read_text().split()[1]) * 4096 / 2**20
        return Held(len(list((folder / "fd").iterdir())), mib, json.loads(self.serving.stdout.readline()))

    async def change(self, http: aiohttp.ClientSession, text: str, *, sound: bool, waits: bool) -> None:
        """Write `text`, and have it read: at once, or when the router `waits` for its next look."""
        at, version = f"http://127.0.0.1:{self.files.admin}/admin", hashlib.sha256(text.encode()).hexdigest()[:12]
        self.sla.write_text(text)
        if not waits:
            async with http.post(f"{at}/reload") as reply:
                body = await reply.text()
                if (reply.status == 200) != sound:
                    self.wrong.append(f"a file was answered {reply.status}: {body[:300]}")
        else:
            for _ in range(60):
                await asyncio.sleep(0.1)
                async with http.get(f"{at}/config") as reply:
                    if (await reply.json())["version"] == version:
                        break
        async with http.get(f"{at}/config") as reply:
            in_force = (await reply.json())["version"]
        if sound and in_force != version:
            self.wrong.append(f"version {version} is not in effect")
        if not sound:
            self.refused += 1
            if in_force == version:
                self.wrong.append("a file with a mistake is in effect")
        self.history.append((time.time(), in_force))

    async def run(self, changes: int, clients: int) -> None:
        """The whole soak; `wrong` has what was."""
        rng, first = self.files.rng, self.sla.read_text()
        load = Clients(f"http://127.0.0.1:{self.files.http}", random.Random(7))
        async with aiohttp.ClientSession() as http:
            self.history.append((time.time(), hashlib.sha256(first.encode()).hexdigest()[:12]))
            asking = [asyncio.create_task(load.ask_on(number)) for number in range(clients)]
            await asyncio.sleep(5)
            print("| changes | refused | requests | lost | MiB | descriptors | connections at the engines |")
            print("|---|---|---|---|---|---|---|")
            for number in range(changes + 1):
                if number % max(1, changes // 10) == 0:
                    held = await asyncio.to_thread(self.held)
                    counts = (number, self.refused, load.ended.total(), len(load.lost), f"{held.mib:.0f}")
                    print("|", " | ".join(map(str, (*counts, held.descriptors, held.engines))), "|", flush=True)
                sound = rng.random() > 0.1
                text = first if number == changes else self.files.some() if sound else self.files.broken()
                is_last = number == changes
                await self.change(http, text, sound=sound or is_last, waits=sound and rng.random() < 0.25)
                await asyncio.sleep(rng.choice([0.0, 0.1, 0.5, 2.0]))
            await asyncio.sleep(3)
            load.is_over = True
            await asyncio.gather(*asking)
            self.wrong += load.lost
            await self._is_level(http)
        print(f"requests: {dict(load.ended)}, lost: {len(load.lost)}")

    async def _is_level(self, http: aiohttp.ClientSession) -> None:
        """Only the engine of the first file may have connections, and no gauge may show a request."""
        for _ in range(60):
            held = await asyncio.to_thread(self.held)
            if not any(held.engines[1:]):
                break
            await asyncio.sleep(0.5)
        print(f"at the end: {held}")
        if any(held.engines[1:]):
            self.wrong.append(f"connections are left at engines that the file does not name: {held.engines}")
        async with http.get(f"http://127.0.0.1:{self.files.admin}/metrics") as reply:
            page = await reply.text()
        for name, labels, value in re.findall(
            r"^(pointsman_(?:queued|in_flight|backend_in_flight)\w*)(\S*) (\S+)$", page, re.MULTILINE
        ):
            if float(value):
                self.wrong.append(f"{name}{labels} is {value}")
        names = set(re.findall(r'^pointsman_backend_in_flight\{.*?backend="([^"]+)"', page, re.MULTILINE))
        if names - {"own-0"}:
            self.wrong.append(f"metrics of backends that are gone: {sorted(names)}")

    def check_decisions(self) -> None:
        """Each decision must name a version that was in effect when its request came, or took effect soon after."""
        logs = sorted(self.files.log.parent.glob("decisions.jsonl*"))
        records = [record for log in logs for _, record in records_of(log)]
        for record in records:
            begun = [at for at, version in self.history if version == record.config]
            if not begun:
                self.wrong.append(f"request {record.request} names version {record.config}, which never was in effect")
                continue
            before = [version for at, version in self.history if at < record.time - SETTLES_S]
            later = {version for at, version in self.history if record.time - SETTLES_S <= at < record.time + SETTLES_S}
            if record.config not in {*before[-1:], *later}:
                self.wrong.append(f"request {record.request} names version {record.config}, of another time")
        versions = {record.config for record in records}
        print(f"decisions: {len(records)}, by {len(versions)} of {len({v for _, v in self.history})} versions")


@contextmanager
def programs(folder: Path, seed: int) -> Iterator[Soak]:
    """Engines and a router that follows a file."""
    *ports, http, admin = free_ports(ENGINES + 2)
    files = Files(ports, http, admin, folder / "decisions.jsonl", random.Random(seed))
    sla = folder / "sla.yaml"
    sla.write_text(files.first())
    command = [sys.executable, __file__, "--as-engines", *map(str, ports)]
    serving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    serve = (sys.executable, "-c", "from router.start.cli import main; main()", "serve", str(sla))
    environment = {"PYTHONPATH": str(ROOT), "FIRST_KEY": "first", "SECOND_KEY": "second"}
    router = Program("router", serve, folder, f"http://127.0.0.1:{http}/readyz", environment)
    try:
        router.start()
        router.wait_until_ready(60)
        yield Soak(files, sla, router, serving)
    finally:
        router.stop()
        serving.terminate()
        serving.wait(20)


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the files and logs; default a temporary one")
    parser.add_argument("--as-engines", type=int, nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_engines:
        asyncio.run(engines(chosen.as_engines))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with programs(folder, chosen.seed) as soak:
            asyncio.run(soak.run(chosen.changes, chosen.clients))
        # the router has written its log
        soak.check_decisions()
    if soak.wrong:
        kinds = Counter(re.sub(r"[0-9a-f]{6,}", "...", line)[:160] for line in soak.wrong)
        raise SystemExit("\n".join(f"{count} times: {line}" for line, count in kinds.most_common(20)))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
