"""Hot reload: whatever is written into the file, one whole version of it decides."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from policies.errors import ConfigError
from policies.sla.parse import parse
from router.call.bodies import Held
from router.call.gateway import Gateway
from router.operate.operations import Operations
from router.protocols.openai.request import chat_ask
from router.start.app import Router
from router.start.build import build
from router.start.config_file import Contents, Stamp
from router.start.reload import Reloader, as_shadow
from tests.router.callers import Listener, ended, well
from tests.router.parts import CHAT, MODEL, ScriptedBackend, Step, a_chat, a_client, an_answer

POOLS = f"pools: {{own: {{kind: fake, at: ['x:1'], model: {MODEL}}}}}\nserver: {{http: '127.0.0.1:0', grpc: off}}\n"


def a_file(number: int) -> str:
    """A sound file in which everything that a decision shows has this number."""
    return (
        f"classes: {{class-{number}: {{}}}}\ntenants: {{tenant-{number}: {{anonymous: true}}}}\n"
        f"rules: [{{class: class-{number}, policy: policy-{number}}}]\n"
        f"policies: {{policy-{number}: {{pick: best}}}}\n{POOLS}"
    )


@dataclass
class Paper:
    """An SLA file in memory."""

    text: str
    stamps: list[Stamp | None] = field(default_factory=list)
    reads: int = 0
    now: Stamp | None = None

    def __str__(self) -> str:
        return "paper.yaml"

    def read(self) -> Contents:
        self.reads += 1
        return Contents(self, self.text, parse(self.text, source=str(self)), self.now)

    def stamp(self) -> Stamp | None:
        self.now = self.stamps.pop(0) if self.stamps else None
        return self.now


def a_router(paper: Paper, *scripts: list[Step]) -> tuple[Operations, Reloader]:
    started, backend = paper.read(), ScriptedBackend(speaks_tokens=False, scripts=list(scripts))
    operations = build(started.config, backends=lambda _: [backend], rng=random.Random(1))
    return operations, Reloader(operations, started)


def a_gateway(paper: Paper, *scripts: list[Step]) -> tuple[Gateway, Reloader]:
    operations, reloader = a_router(paper, *scripts)
    return operations.gateway, reloader


def counted(gateway: Gateway, name: str) -> dict[str, float]:
    return {
        next(iter(sample.labels.values())): sample.value
        for metric in gateway.observer.registry.collect()
        for sample in metric.samples
        if sample.name == f"pointsman_{name}"
    }


def broken(text: str, rng: random.Random) -> str:
    """`text` after some slip of the pen; it may still be sound."""
    at, length = rng.randrange(len(text)), rng.randrange(1, 12)
    slips = [
        lambda: text[:at] + text[at + length :],
        lambda: text[:at] + rng.choice(["{", ":", "\t", "\x00", "é", "&a", "*a", "- ", "!!x "]) + text[at:],
        lambda: text[:at],
        lambda: text + rng.choice(["classes: {}\n", "nonsense: 1\n", "pools: {own: {local: 2}}\n"]),
        lambda: text.replace("x:1", "x:2"),
        lambda: text.replace("own", "other"),
    ]
    return rng.choice(slips)()


async def test_hundreds_of_edits_never_leave_a_mixed_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pointsman.decision")
    rng, paper = random.Random(4), Paper(a_file(0))
    gateway, reloader = a_gateway(paper)
    await well(gateway, "b0")
    numbers = {gateway.config.version: 0}
    accepted = 0
    for number in range(1, 301):
        sound = a_file(number)
        paper.text = broken(sound, rng) if rng.random() < 0.5 else sound
        before = gateway.config
        if await reloader.reload() is None:
            accepted += 1
            numbers[gateway.config.version] = number
            assert gateway.config.version == parse(paper.text).version
        else:
            assert gateway.config is before
        caplog.clear()
        assert await ended(Listener(chat_ask(a_chat()), key=None), gateway) is None
        (line,) = [json.loads(record.message) for record in caplog.records if record.name == "pointsman.decision"]
        assert line["config_version"] == gateway.config.version
        if paper.text == sound:
            decided = numbers[line["config_version"]]
            assert [line["tenant"], line["service_class"], line["policy"]] == [
                f"{what}-{decided}" for what in ("tenant", "class", "policy")
            ]
    assert 120 < accepted < 270
    assert counted(gateway, "config_reloads_total") == {"accepted": accepted, "refused": 300 - accepted}
    assert counted(gateway, "config_info") == {gateway.config.version: 1}
    gateway.check()


async def test_a_call_keeps_the_file_that_it_began_with(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Listener):
        async def read(self, held: Held) -> Any:
            paper.text = a_file(2)
            assert await reloader.reload() is None
            return await super().read(held)

    caplog.set_level(logging.INFO, "pointsman.decision")
    paper = Paper(a_file(1))
    gateway, reloader = a_gateway(paper)
    began_with = gateway.config.version
    await well(gateway, "b0")
    assert await ended(Slow(chat_ask(a_chat()), key=None), gateway) is None
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "pointsman.decision"]
    assert (line["config_version"], line["service_class"]) == (began_with, "class-1")
    assert gateway.config.version != began_with


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{own:", "{more: {local: 1}, own:", "paper.yaml:5: pools.more: is a new pool (restart to change pools with"),
        ("['x:1']", "['x:1'], options: {events: 'tcp://x:1'}", "events"),
        ("grpc: off", "grpc: 'x:1'", "paper.yaml:6: server.grpc: cannot change while the router runs"),
        ("grpc: off", "grpc: off, max_body: 1MiB", "server.max_body: cannot change"),
        ("best", "bets", "there is no pick 'bets' (did you mean 'best'?)"),
    ],
)
async def test_what_cannot_take_effect_is_refused_with_its_reason(
    old: str, new: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    paper = Paper(a_file(1))
    gateway, reloader = a_gateway(paper)
    before = gateway.config
    paper.text = paper.text.replace(old, new)
    assert await reloader.reload()
    assert problem in caplog.text
    assert f"version {before.version} stays in effect" in caplog.text
    assert gateway.config is before


async def test_a_file_that_is_empty_all_at_once_is_not_taken_for_its_word(caplog: pytest.LogCaptureFixture) -> None:
    paper = Paper(a_file(1))
    _, reloader = a_gateway(paper)
    paper.text = "\n"
    assert await reloader.reload()
    assert "is empty" in caplog.text


async def test_limits_of_the_server_that_can_change_do() -> None:
    paper = Paper(a_file(1))
    gateway, reloader = a_gateway(paper)
    paper.text = paper.text.replace("grpc: off", "grpc: off, drain: 5s, max_concurrent: 7")
    assert await reloader.reload() is None
    assert (gateway.config.server.drain_s, gateway.config.server.max_concurrent) == (5.0, 7)


async def test_a_waiting_request_is_placed_by_a_file_that_allows_it() -> None:
    paper, held = Paper(a_file(1).replace("grpc: off", "grpc: off, max_concurrent: 1")), asyncio.Event()
    gateway, reloader = a_gateway(paper, [held, *an_answer("ok")])
    await well(gateway, "b0")
    callers = [Listener(chat_ask(a_chat()), key=None) for _ in range(2)]
    callers[1].id = "r2"
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        first, second = (group.create_task(ended(caller, gateway)) for caller in callers)
        while not gateway.dispatcher.waiting()[0]:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
        paper.text = paper.text.replace("max_concurrent: 1", "max_concurrent: 2")
        assert await reloader.reload() is None
        assert await second is None
        held.set()
        assert await first is None


async def test_a_file_is_read_when_it_has_changed_and_come_to_rest() -> None:
    paper = Paper(a_file(1), stamps=[None, (1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 1)])
    _, reloader = a_gateway(paper)
    reads = []
    for _ in range(5):
        await reloader.look()
        reads.append(paper.reads - 1)
    assert reads == [0, 0, 0, 1, 1]


async def test_a_file_that_was_read_on_request_is_not_read_again_until_it_changes() -> None:
    paper = Paper(a_file(1), stamps=[(2, 2, 1), (2, 2, 1), (3, 3, 1), (3, 3, 1)])
    _, reloader = a_gateway(paper)
    paper.now, reads = (2, 2, 1), []
    await reloader.reload()
    for _ in range(4):
        await reloader.look()
        reads.append(paper.reads - 1)
    assert reads == [1, 1, 1, 2]


async def test_a_watched_file_is_read_after_it_changed_without_being_asked() -> None:
    paper = Paper(a_file(1), stamps=[None, None, (1, 1, 1), (2, 2, 1), (2, 2, 1)])
    operations, _ = a_router(paper)
    reloader = Reloader(operations, paper.read(), every_s=0.001)
    reads, paper.text = paper.reads, a_file(2)
    watching = asyncio.create_task(reloader.watch())
    async with asyncio.timeout(5):
        while list(operations.gateway.config.classes) != ["class-2"]:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert (paper.reads, paper.stamps) == (reads + 1, [])


async def test_a_running_router_takes_a_changed_file_when_asked() -> None:
    paper = Paper(a_file(1))
    started = paper.read()
    backend = ScriptedBackend()
    async with Router(started.config, backends=lambda _: [backend], file=started) as router:
        assert await router.wait_until_reached(5)
        assert router.reloader is not None
        paper.text = a_file(2)
        router.reloader.ask()
        async with asyncio.timeout(5):
            while router.gateway.config.version == started.config.version:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        async with a_client(router) as client, client.post(CHAT, a_chat(), key=None) as reply:
            assert reply.headers["x-pointsman-class"] == "class-2"
    router.check()


def test_the_state_of_a_reloader_can_be_read() -> None:
    paper = Paper(a_file(1))
    _, reloader = a_gateway(paper)
    assert repr(reloader) == f"<Reloader of paper.yaml, version {parse(paper.text).version} decides>"


def test_paper_is_refused_as_a_file_is() -> None:
    with pytest.raises(ConfigError):
        Paper("classes: [").read()


async def test_a_shadow_file_is_taken_without_effect_even_if_its_pools_differ() -> None:
    paper, shadow = Paper(a_file(1)), Paper(a_file(2))
    operations, _ = a_router(paper)
    gateway, before = operations.gateway, operations.gateway.config
    reloader = Reloader(operations, shadow.read(), take=as_shadow)
    shadow.text = a_file(3).replace("own:", "mine:")
    assert await reloader.reload() is None
    assert gateway.config is before
    assert gateway.decider.shadow is not None
    assert list(gateway.decider.shadow.classes) == ["class-3"]
    shadow.text = "classes: [oops]"
    assert "must be a mapping" in (await reloader.reload() or "")
    assert list(gateway.decider.shadow.classes) == ["class-3"]
