"""The files that one short request touches, and its calls of our functions, by file.

    python benchmarks/request_path.py [--backend fake|openai] [--stream] [--state] [--calls]

A router with the policy, keys, index, quotas and metrics of an ordinary file serves a scripted backend (`kind: fake`),
or with `--backend openai` a small server with OpenAI's API: calls of the server are not counted.
A few requests warm it up; then the calls of one request are counted with Python's profiler, from its first byte to the
last. Background work that happens to run in these milliseconds (probes, lag, feeds) is left out. What the request
leaves to be done behind it (`router/later.py`: counting, learning) is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from policies.sla.parse import parse
from router.start.app import Router
from router.start.state import State
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

KEY = "a-key-for-measurements-only"
SLA = """
classes: {{chat: {{ttft_p95: 60s}}}}
tenants: {{acme: {{keys: ["sha256:{key}"], limits: {{requests_per_minute: 100000, tokens_per_minute: 100M}}}}}}
pools: {{own: {pool}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""
FAKE = '{kind: fake, at: ["a:1", "b:1"], model: m}'
OURS = tuple(f"{ROOT}/{package}/" for package in ("router", "policies", "backends", "shards", "http1"))
BACKGROUND = ("supervise.py", "probes.py", "telemetry.py:measure_lag", "feeds.py", "discovery.py", "reload.py")


class Calls:
    """Counts calls of our functions, by file and name, while it is set as the profiler."""

    def __init__(self) -> None:
        self.by_function: Counter[tuple[str, str]] = Counter()
        self.behind: Counter[tuple[str, str]] = Counter()
        self.deepest = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        depth, above, counts = 0, frame, self.by_function
        while above is not None:
            name = f"{Path(above.f_code.co_filename).name}:{above.f_code.co_name}"
            if any(name.startswith(part) for part in BACKGROUND):
                return
            if name.startswith("later.py:_do"):
                counts = self.behind
            depth += above.f_code.co_filename.startswith(OURS)
            above = above.f_back  # type: ignore[assignment]
        self.deepest = max(self.deepest, depth)
        counts[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += 1


async def traced(backend: str, *, stream: bool, state: Path | None) -> Calls:
    """The calls of one request to a warm router."""
    async with AsyncExitStack() as stack:
        pool = FAKE
        if backend == "openai":
            # several tokens that come together
            servers = [await stack.enter_async_context(running(OpenAIServer(text="Hi."))) for _ in range(2)]
            pool = f"{{kind: openai_compatible, at: {[server.url for server in servers]}, model: m}}"
        sla = SLA.format(key=hashlib.sha256(KEY.encode()).hexdigest(), pool=pool)
        router = await stack.enter_async_context(Router(State(state).fill(parse(sla))))
        assert await router.wait_until_reached(10)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": stream})
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as http:
            url = f"{router.http_url}/v1/chat/completions"

            async def ask() -> None:
                async with http.post(url, data=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

            for _ in range(20):
                await ask()
            await asyncio.sleep(0.1)
            calls = Calls()
            sys.setprofile(calls)
            await ask()
            await asyncio.sleep(0.05)
            sys.setprofile(None)
    return calls


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--backend", choices=("fake", "openai"), default="fake", help="what answers; default: fake")
    reader.add_argument("--stream", action="store_true", help="ask for a stream of events")
    reader.add_argument("--calls", action="store_true", help="list every function")
    reader.add_argument("--state", action="store_true", help="keep usage, budgets and keys in a state folder")
    options = reader.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) if options.state else None
        calls = asyncio.run(traced(options.backend, stream=options.stream, state=state))
    files: Counter[str] = Counter()
    for (file, _), count in calls.by_function.items():
        files[file] += count
    for file, count in files.most_common():
        print(f"{count:5}  {file}")
        if options.calls:
            for (where, name), times in calls.by_function.most_common():
                if where == file:
                    print(f"            {times:4}  {name}")
    print(f"{len(files)} files, {sum(files.values())} calls, {calls.deepest} frames deep")
    behind = {file for file, _ in calls.behind}
    print(f"and behind it {calls.behind.total()} calls, in {len(behind - files.keys())} other files")


if __name__ == "__main__":
    main()
