"""Runs clients and suites of others against a router, and writes the table of docs/conformance.md.

usage: python -m tests.conformance [--only SUITE]

Suites come from package registries into .venv-conformance (`make conformance`); Codex and Claude Code into a folder of
npm's below it. Those that are not there are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from policies.sla.parse import parse
from router.start.app import Router
from tests.conformance.open_responses import REQUESTS, problems_of
from tests.conformance.scripted_engine import DONE, ScriptedEngine
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/conformance.md"
ENVIRONMENT, ENGINES = ROOT / ".venv-conformance", ROOT / ".venv-engines"
NPM = ENVIRONMENT / "npm/node_modules/.bin"
TURNS = 10
SMALL_CONTEXT_BYTES = 20_000
"""Less than the first prompt of a coding agent."""
_BEGIN, _END = "<!-- begin: results -->\n", "<!-- end: results -->\n"


class Row(NamedTuple):
    """The result of a suite."""

    suite: str
    version: str
    passed: int
    failed: int
    why: str = ""


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    output: str


@asynccontextmanager
async def a_router(engine: ScriptedEngine) -> AsyncIterator[str]:
    """The URL of a router in front of `engine`."""
    async with AsyncExitStack() as stack:
        server = TestServer(engine.app())
        await server.start_server()
        stack.push_async_callback(server.close)
        yield await stack.enter_async_context(_serving(str(server.make_url(""))))


@asynccontextmanager
async def _serving(engine: str) -> AsyncIterator[str]:
    pool = {"kind": "openai_compatible", "model": "m", "at": [engine]}
    serves = {"http": "127.0.0.1:0", "grpc": "off"}
    sla = {"classes": {"chat": {}}, "pools": {"own": pool}, "rules": [{"class": "chat"}], "server": serves}
    async with Router(parse(json.dumps(sla))) as router:
        assert await router.wait_until_reached(10)
        yield router.http_url


async def run(*command: str | Path, timeout_s: float = 120, cwd: str | None = None, **env: str) -> Ended:
    """Run `command` to its end."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # its children end with it
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return Ended(124, f"did not end within {timeout_s:g} s")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    return Ended(process.returncode or 0, output.decode(errors="replace"))


async def codex(program: Path, url: str, prompt: str) -> Ended:
    """Codex CLI with a provider at `url`, and no further option."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        provider = f'name = "p"\nbase_url = "{url}/v1"\nenv_key = "KEY"\nwire_api = "responses"\n'
        config = f'model = "m"\nmodel_provider = "p"\n[model_providers.p]\n{provider}'
        await asyncio.to_thread(Path(home, "config.toml").write_text, config)
        options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return await run(program, "exec", *options, prompt, cwd=work, CODEX_HOME=home, KEY="k")


async def claude_code(program: Path, url: str, prompt: str) -> Ended:
    """Claude Code with its base URL and key, and no further option."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        where = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "k", "ANTHROPIC_MODEL": "m", "HOME": home}
        where |= {"ANTHROPIC_SMALL_FAST_MODEL": "m", "IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        return await run(program, "-p", prompt, "--dangerously-skip-permissions", cwd=work, **where)


Agent = Callable[[Path, str, str], Awaitable[Ended]]
_OVERFLOWS = {"codex": "ran out of room in the model's context window", "claude": "Prompt is too long"}
"""What an agent says if it recognises that a prompt was too long."""


async def coding_agents() -> list[Row]:
    """Text, ten turns with a tool, overflow and cancellation; passed on and translated."""
    rows = []
    for name, agent, title in (("codex", codex, "Codex CLI"), ("claude", claude_code, "Claude Code")):
        program = NPM / name
        if not program.exists():
            continue
        wrong = list[str]()
        for native in (True, False):
            how = "passed" if native else "translated"
            wrong += [f"{how}: {what}" for what in await _agent(program, agent, _OVERFLOWS[name], native=native)]
        version = (await run(program, "--version")).output.strip().split("\n")[0]
        found = re.search(r"\d+\.\d+\.\d+", version)
        rows.append(Row(title, found[0] if found else "", 8 - len(wrong), len(wrong), "; ".join(wrong)))
    return rows


async def _agent(program: Path, agent: Agent, overflow: str, *, native: bool) -> list[str]:
    wrong = []
    engine = ScriptedEngine(0, native)
    async with a_router(engine) as url:
        said = await agent(program, url, "say it")
        wrong += [] if DONE in said.output else [f"text: {said.output[-80:]!r}"]
        engine.turns = TURNS
        said = await agent(program, url, "run ten steps")
        wrong += [] if DONE in said.output and engine.most_results >= TURNS else [f"tools: {said.output[-80:]!r}"]
        engine.context_bytes = SMALL_CONTEXT_BYTES
        said = await agent(program, url, "run ten steps")
        wrong += [] if overflow in said.output else [f"overflow: {said.output[-80:]!r}"]
    slow = ScriptedEngine(0, native, delay_s=0.5, text="a " * 200)
    async with a_router(slow) as url:
        task = asyncio.ensure_future(agent(program, url, "say it"))
        async with asyncio.timeout(60):
            while not slow.open:  # noqa: ASYNC110 - sockets announce nothing
                await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(30):
            while slow.open:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    return wrong


async def open_responses() -> list[Row]:
    """Each request, translated and passed on."""
    wrong, tried = list[str](), 0
    for native in (True, False):
        for name in REQUESTS:
            async with a_router(ScriptedEngine(1, native)) as url:
                found = await asyncio.to_thread(problems_of, url, name, is_translated=not native)
            tried += 1
            wrong += [f"{name}: {', '.join(found)}"] if found else []
    why = "; ".join(wrong) or "the request with an image is left out"
    return [Row("Open Responses, compliance requests", "2026-11", tried - len(wrong), len(wrong), why)]


async def workers() -> list[Row]:
    """Other routers take this router as their worker without an option."""
    rows, pointsman = [], Path(sys.executable).with_name("pointsman")
    async with a_router(ScriptedEngine(0)) as url:
        for title, package, command in (
            (
                "SMG, in front",
                "smg",
                (ENGINES / "bin/smg", "launch", "--worker-urls", url, "--host", "127.0.0.1", "--port"),
            ),
            ("vllm-router, in front", "vllm-router", (ENGINES / "bin/vllm-router", "--worker-urls", url, "--port")),
            (
                "a second Pointsman, in front",
                "pointsman",
                (pointsman, "serve", "--to", url, "--admin", "off", "--http"),
            ),
        ):
            if shutil.which(str(command[0])) is None:
                continue
            at = f"127.0.0.1:{_free_port()}"
            port = at if package == "pointsman" else at.rpartition(":")[2]
            beside = ("--prometheus-port", str(_free_port())) if package != "pointsman" else ()
            why = await _as_worker([*map(str, command), port, *beside], f"http://{at}")
            version = await _version(Path(command[0]).parent / "python", package)
            rows.append(Row(title, version, int(not why), int(bool(why)), why))
    return rows


def _free_port() -> int:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return int(there.getsockname()[1])


async def _as_worker(command: Sequence[str], url: str) -> str:
    """What is wrong with a chat through the router that `command` runs."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    body, last = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "it never listened"
    try:
        async with asyncio.timeout(60), ClientSession() as http:
            while True:
                try:
                    async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
                        last = (await reply.text())[:100]
                        if reply.status == 200 and DONE in await reply.text():
                            return ""
                except OSError:
                    pass
                await asyncio.sleep(0.5)
    except TimeoutError:
        return last
    finally:
        process.terminate()
        await process.wait()


async def schemathesis() -> list[Row]:
    """Fuzzes every operation of the OpenAPI document that the router serves."""
    program = ENVIRONMENT / "bin/schemathesis"
    if not program.exists():
        return []
    title, version = "schemathesis, on /openapi.json", await _version(ENVIRONMENT / "bin/python", "schemathesis")
    async with a_router(ScriptedEngine(0)) as url:
        options = ("--max-examples", "10", "--checks", "not_a_server_error", "--seed", "1")
        ended = await run(program, "run", f"{url}/openapi.json", *options, timeout_s=400)
    tested = re.search(r"Tested: (\d+)", ended.output)
    failures = re.search(r"Server error: (\d+)", ended.output)
    if tested is None:
        return [Row(title, version, 0, 1, ended.output[-100:].replace("\n", " "))]
    failed = max(0, int(failures[1]) if failures else 0) - ended.output.count("curl -X TRACE")
    passed = int(tested[1]) - failed
    return [Row(title, version, passed, failed, "operations; TRACE gets 501 (RFC 9110, 9.1), which is not counted")]


async def libraries() -> list[Row]:
    """SDKs with ten calls of a tool, where the engine speaks the dialect and where it does not."""
    python, rows = ENVIRONMENT / "bin/python", list[Row]()
    if not python.exists():
        return []
    async with running(OpenAIServer()) as pooled, _serving(pooled.url) as of_pooled:
        for native in (True, False):
            async with a_router(ScriptedEngine(TURNS, native)) as url:
                script = Path(__file__).with_name("sdks.py")
                ended = await run(python, script, url, of_pooled, timeout_s=400)
            lines = [line.split("\t") for line in ended.output.splitlines() if line.count("\t") == 4]
            how = "passed" if native else "translated"
            rows += [Row(f"{name}, {how}", version, int(ok), int(bad), why) for name, version, ok, bad, why in lines]
            if not lines:
                rows.append(Row(f"libraries, {how}", "", 0, 1, ended.output[-150:].replace("\n", " ")))
    return rows


async def ai_sdk() -> list[Row]:
    """Vercel's AI SDK, where the engine speaks the dialect and where it does not."""
    there = NPM.parent
    if shutil.which("node") is None or shutil.which(str(NPM / "codex")) is None:
        return []
    manifest = await asyncio.to_thread((there / "ai/package.json").read_bytes)
    version, rows = str(json.loads(manifest)["version"]), list[Row]()
    # a module finds its packages from where it lies
    script = shutil.copy(Path(__file__).with_name("ai_sdk.mjs"), there.parent)
    for native in (True, False):
        async with a_router(ScriptedEngine(TURNS, native)) as url:
            ended = await run("node", script, url, timeout_s=200)
        tried = [line.split("\t") for line in ended.output.splitlines() if line.count("\t") == 2]
        wrong = [f"{name} {how}: {said}" for name, how, said in tried if said != "ok"]
        title = f"Vercel's AI SDK, {'passed' if native else 'translated'}"
        rows.append(Row(title, version, len(tried) - len(wrong), len(wrong) or int(not tried), "; ".join(wrong)))
    return rows


async def _version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return (await run(python, "-c", code)).output.strip().split("\n")[-1][:20]


SUITES: Mapping[str, Callable[[], Awaitable[list[Row]]]] = {
    "agents": coding_agents,
    "open_responses": open_responses,
    "workers": workers,
    "schemathesis": schemathesis,
    "libraries": libraries,
    "ai_sdk": ai_sdk,
}


def written(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the table."""
    yield "| suite | version | passed | failed | notes |"
    yield "|---|---|---|---|---|"
    for row in rows:
        why = row.why.replace("|", "\\|")
        yield f"| {row.suite} | {row.version} | {row.passed} | {row.failed} | {why} |"


async def main() -> int:
    """Run all suites, or those of one name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SUITES)
    given = parser.parse_args()
    rows = list[Row]()
    for name, suite in SUITES.items():
        if given.only in (None, name):
            found = await suite()
            rows += found
            print("\n".join(written(found)), flush=True)
    if given.only is None:
        page = PAGE.read_text()
        before, _, rest = page.partition(_BEGIN)
        after = rest.partition(_END)[2]
        PAGE.write_text(before + _BEGIN + "\n".join(written(rows)) + "\n" + _END + after)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
