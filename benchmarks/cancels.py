"""Clients that leave at random moments: 1,000,000 requests, each closed or reset after a random time.

`python benchmarks/cancels.py --cancels 1000000`. The router runs in a process of its own in front of backends that
answer from a script; half of the requests are streams, and a tenth of them are cut within their bytes. Afterwards every
gauge has to be at zero, no event of an unplanned failure counted, and descriptors and memory as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLA = """
classes: {chat: {}}
tenants: {acme: {anonymous: true}}
pools: {own: {kind: fake, at: ["a:1", "b:1"], model: demo, options: {delay_s: 0.004}}}
rules: [{class: chat}]
server: {http: "127.0.0.1:PORT", grpc: off, metrics: open, strangers: off, state: off}
"""


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


def left(page: str) -> dict[str, float]:
    """The samples that should be zero when nothing is left, and are not."""
    found = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        is_gauge = re.match(r"pointsman_(queued|backend_in_flight|http_connections)", name)
        if (is_gauge or 'event="unplanned_failure"' in name) and float(value):
            found[name] = float(value)
    return found


def outcomes(page: str) -> dict[str, int]:
    """Requests by how they ended."""
    found: dict[str, int] = {}
    for name, value in re.findall(r'pointsman_requests_total\{[^}]*outcome="(\w+)"[^}]*\} (\S+)', page):
        found[name] = found.get(name, 0) + int(float(value))
    return found


def held(pid: int) -> tuple[int, float]:
    """Descriptors, and resident memory in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def leave(port: int, rng: random.Random) -> None:
    """Send a request, and leave after a random time."""
    body = json.dumps(
        {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": rng.random() < 0.5}
    ).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    if rng.random() < 0.1:
        request = request[: rng.randrange(len(request))]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await asyncio.sleep(rng.random() ** 2 * 0.06)
    if rng.random() < 0.5:
        raw = writer.transport.get_extra_info("socket")
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort() if rng.random() < 0.5 else writer.close()


async def crowd(port: int, cancels: int, at_once: int, seed: int, router: int) -> None:
    rng, begun, began_at = random.Random(seed), 0, time.perf_counter()

    async def work() -> None:
        nonlocal begun
        while begun < cancels:
            begun += 1
            if begun % 20_000 == 0:
                per_s = begun / (time.perf_counter() - began_at)
                print(f"{begun} of {cancels}, {per_s:.0f}/s, the router has {held(router)[1]:.0f} MiB", flush=True)
            with suppress(OSError):
                await leave(port, rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cancels", type=int, default=1_000_000)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        file, log = Path(folder) / "sla.yaml", Path(folder) / "log"
        file.write_text(SLA.replace("PORT", str(port)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with log.open("wb") as out:
            router = subprocess.Popen(
                [sys.executable, "-P", "-m", "router", "serve", str(file)], stdout=out, stderr=out, env=environment
            )
        try:
            for _ in range(200):
                with suppress(OSError):
                    metrics(port)
                    break
                time.sleep(0.1)
            asyncio.run(crowd(port, min(2000, chosen.cancels), chosen.at_once, 0, router.pid))
            before = held(router.pid)
            asyncio.run(crowd(port, chosen.cancels, chosen.at_once, chosen.seed, router.pid))
            time.sleep(3)
            print(f"descriptors and MiB: before {before}, afterwards {held(router.pid)}")
            # the request for metrics is a connection itself
            page = metrics(port)
            print(f"ended: {outcomes(page)}")
            print(f"left: {left(page)}")
            lines = log.read_text().splitlines()
            print(f"{len(lines)} lines in the log, {sum('Traceback' in line for line in lines)} tracebacks")
            print(*lines[-3:], sep="\n")
            if left(page):
                raise SystemExit("something is left")
        finally:
            router.terminate()
            router.wait(20)


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
