"""The first hour of four kinds of users, each in a fresh home, by the commands of the pages; every step with its time.

usage: python -m tests.docs.first_hour [NAME...] (engines, rag, checkpoint, contributor; default: the first three)

`test_first_hour.py` runs all but the contributor, who needs a package index and several minutes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shards.bundled import weights
from tests.docs.blocks import ROOT
from tests.docs.reader import Desk
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer


@dataclass
class Hour:
    """What one user did at a `desk`: the steps in words, with their seconds."""

    desk: Desk
    steps: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.steps.append((what, time.perf_counter() - began))

    def type(self, command: str, *, exits: int = 0) -> str:
        """The output of `command`, which ends with this status."""
        desk = self.desk
        status, output = desk.run(desk.script(desk.ports.inward(command)), desk.ports)
        assert status == exits, f"{command}: {status}, not {exits}\n{output}"
        return output

    def start(self, command: str, *, until: str) -> str:
        """The output of `command` until it has these words; it goes on running."""
        return self.desk.start(self.desk.ports.inward(command), until=until)


async def engines(hour: Hour) -> None:
    """A platform engineer: a file before any engine is up, then two engines, tenants with keys, and the dashboard."""
    async with two_engines() as (first, second, later):
        at = f"--to {first.url} --to {second.url}"
        with hour.step("init, two tenants with keys"):
            said = await asyncio.to_thread(hour.type, f"pointsman init {at} --tenant search --tenant ads --ttft 800ms")
        keys = [line.rpartition(" ")[2] for line in said.splitlines() if line.startswith("key of ")]
        assert len(keys) == 2
        with hour.step("check"):
            assert "is sound" in await asyncio.to_thread(hour.type, "pointsman check sla.yaml")
        with hour.step("serve before the engines are up: addresses, and what is waited for"):
            file = hour.desk.directory / "sla.yaml"
            text = file.read_text()
            file.write_text(text.replace(first.url, later[0]).replace(second.url, later[1]))
            said = await asyncio.to_thread(hour.start, "pointsman serve sla.yaml", until="Waiting for pool")
            assert "Pointsman listens" in said
        file.write_text(text)
        with hour.step("serve in front of both"):
            await asyncio.to_thread(hour.start, "pointsman serve sla.yaml", until="Pointsman serves m")
        with hour.step("the first answer, with a key"):
            ask = f"POINTSMAN_KEY={keys[0]} pointsman chat Hello --at http://127.0.0.1:8080"
            assert "first token after" in await asyncio.to_thread(hour.type, ask)
        with hour.step("a wrong key is a sentence"):
            wrong = "POINTSMAN_KEY=wrong pointsman chat Hello --at http://127.0.0.1:8080"
            assert "POINTSMAN_KEY" in await asyncio.to_thread(hour.type, wrong, exits=1)


async def rag(hour: Hour) -> None:
    """A RAG service: one file, the official client's request by curl, a document before its question, a cache hit."""
    with hour.step("up"):
        await asyncio.to_thread(hour.start, "pointsman up", until="Pointsman serves")
    facts = "".join(f"The keeper of the pier number {at} is Ada Holm the {at}th. " for at in range(60))
    (hour.desk.directory / "facts.txt").write_text(facts)
    question = 'pointsman chat "Question: Who is the keeper of the pier number 7?" --max-tokens 24'
    for what in ("a question about a document, piped", "the same again: its beginning is cached"):
        with hour.step(what):
            said = await asyncio.to_thread(hour.type, f"{question} --at http://127.0.0.1:8080 < facts.txt")
    assert "of them cached" in said
    assert "(0%)" not in said
    with hour.step("tables in a terminal"):
        assert "own-0" in await asyncio.to_thread(hour.type, "pointsman top --once --admin 127.0.0.1:8082")


async def checkpoint(hour: Hour) -> None:
    """An engineer with a checkpoint: its help without a model, a mistake, then a shard of it and an answer."""
    with hour.step("shard --help"):
        assert "--kv-memory" in await asyncio.to_thread(hour.type, "pointsman shard --help")
    with hour.step("a folder that is no checkpoint is a sentence"):
        said = await asyncio.to_thread(hour.type, "pointsman up --model ./nothing", exits=1)
        assert "hf download" in said
    (hour.desk.directory / "my-model").symlink_to(weights())
    with hour.step("up --model, the first answer"):
        await asyncio.to_thread(hour.start, "pointsman up --model ./my-model --shards 1", until="Pointsman serves")
        body = {"model": "my-model", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        listed = json.loads(await asyncio.to_thread(hour.type, "curl http://127.0.0.1:8080/v1/models"))
        body["model"] = listed["data"][0]["id"]
        asked = f"curl http://127.0.0.1:8080/v1/chat/completions -d '{json.dumps(body)}'"
        assert "choices" in await asyncio.to_thread(hour.type, asked)


async def contributor(hour: Hour) -> None:
    """A contributor: a clone, the tests of one folder, the page of the command line again."""
    with hour.step("clone"):
        await asyncio.to_thread(hour.type, f"git clone -q {ROOT} clone && cd clone")
    with hour.step("make ready"):
        await asyncio.to_thread(hour.type, "make ready")
    with hour.step("the tests of a folder"):
        await asyncio.to_thread(hour.type, ".venv/bin/python -m pytest -q tests/policies/quota")
    with hour.step("make command-line changes nothing"):
        await asyncio.to_thread(hour.type, "make command-line && git diff --exit-code")


USERS: dict[str, Callable[[Hour], object]] = {user.__name__: user for user in (engines, rag, checkpoint, contributor)}


@asynccontextmanager
async def two_engines() -> AsyncIterator[tuple[VLLMServer, VLLMServer, tuple[str, str]]]:
    """Two stand-ins for vLLM that run, and the addresses of two that do not run yet."""
    async with running(VLLMServer(model="m")) as first, running(VLLMServer(model="m")) as second:
        yield first, second, ("http://127.0.0.1:9", "http://127.0.0.1:10")


def lived(name: str, home: Path) -> Hour:
    """The hour of this user in the new folder `home`. Raises AssertionError with what went wrong."""
    with Desk(home) as desk:
        hour = Hour(desk)
        asyncio.run(USERS[name](hour))  # type: ignore[arg-type]
        return hour


def main(names: list[str]) -> None:
    """Live these hours and print their steps."""
    for name in names or list(USERS)[:3]:
        with tempfile.TemporaryDirectory() as folder:
            hour = lived(name, Path(folder) / "home")
        print(f"{name}: {(USERS[name].__doc__ or '').strip()}")
        for what, seconds in hour.steps:
            print(f"  {seconds:6.1f} s  {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
