"""Drafts of the SLA file over the admin port of a running router, with a file on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.operate.admin_port import AdminPort
from router.start.app import Router
from router.start.commands.config import ConfigCommands
from router.start.config_file import ConfigFile
from router.start.config_writer import version_of
from router.start.drafts import MOST_DRAFTS

FILE = """
classes: {{chat: {{}}, slow: {{}}}}
tenants: {{acme: {{anonymous: true}}}}
pools: {{{pools}}}
rules: [{rules}]
server: {{http: "127.0.0.1:0", grpc: off, admin: "127.0.0.1:0"{more}}}
"""
OWN, MORE = 'own: {kind: fake, at: "x:1", model: m}', 'more: {kind: fake, at: "y:1", model: m}'


def a_file(pools: str = OWN, rules: str = "{class: chat}", more: str = "") -> str:
    return FILE.format(pools=pools, rules=rules, more=more)


@dataclass
class Desk:
    router: Router
    path: Path
    http: aiohttp.ClientSession

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.request(method, f"/admin/config{path}", **more) as reply:
            is_json = reply.content_type == "application/json"
            return reply.status, await reply.json() if is_json else await reply.text()

    async def draft(self, text: str) -> Any:
        status, report = await self.call("POST", "/drafts", data=text.encode())
        assert status == 201, report
        return report

    async def refused(self, method: str, path: str, **more: Any) -> str:
        status, body = await self.call(method, path, **more)
        assert status in (400, 409), body
        return str(body["error"]["message"])

    async def ask(self, **more: Any) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}
        async with self.http.post(f"{self.router.http_url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return reply.headers["x-pointsman-backend"]

    @property
    def in_effect(self) -> str:
        return self.router.gateway.config.version


@asynccontextmanager
async def a_desk(folder: Path, text: str | None = None) -> AsyncIterator[Desk]:
    path = folder / "sla.yaml"
    path.write_text(text or a_file())
    started = ConfigFile(path, {}).read()
    async with Router(started.config, file=started) as router, aiohttp.ClientSession(f"http://{router.admin}") as http:
        assert await router.wait_until_reached(5)
        yield Desk(router, path, http)


async def test_a_draft_is_compared_applied_and_taken_back(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        for stream in (False, True):
            await desk.ask(stream=stream)
        first, text = desk.in_effect, a_file(f"{OWN.replace('x:1', 'z:1')}, {MORE}", "{class: chat, pools: more}")
        report = await desk.draft(text)
        assert (report["version"], report["base"], report["running"]) == (version_of(text), first, first)
        assert report["problems"] == report["restart"] == []
        assert report["changes"] == [
            "~ pools.own.at: x:1 -> z:1",
            "+ pools.more: {kind: fake, at: y:1, model: m}",
            "+ rules[0].pools: more",
        ]
        assert report["backends"] == {"start": ["more-0"], "are_replaced": ["own-0"], "leave": []}
        sample = report["decisions"]
        assert (sample["compared"], sample["differ"], sample["unknown"]) == (2, 2, 0)
        found = {(each["what"], each["now"], each["then"], each["count"]) for each in sample["differences"]}
        assert found == {("pools", "any", "more", 2), ("backend", "own-0", "more-0", 2)}
        assert desk.in_effect == first
        done = await desk.call("POST", f"/drafts/{report['version']}/apply")
        assert done == (200, {"version": version_of(text), "before": first, "in_effect": True})
        assert (desk.path.read_text(), desk.in_effect) == (text, version_of(text))
        assert await desk.ask() == "more-0"
        assert (await desk.call("GET", "/drafts"))[1] == {"drafts": []}
        ((earlier,),) = (await desk.call("GET", "/history"))[1].values()
        assert earlier["version"] == first
        assert (await desk.call("GET", f"/history/{first}"))[1] == a_file()
        done = await desk.call("POST", "/rollback")
        assert done == (200, {"version": first, "before": version_of(text), "in_effect": True})
        assert (desk.path.read_text(), desk.in_effect) == (a_file(), first)
        await desk.call("POST", "/rollback", json={"version": version_of(text)})
        assert desk.in_effect == version_of(text)


async def test_every_mistake_of_a_draft_is_listed_with_its_line_and_nothing_changes(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        report = await desk.draft(a_file().replace("kind: fake", "kind: fak").replace("class: chat}", "class: cha}"))
        problems = [problem.removeprefix(f"{desk.path}:") for problem in report["problems"]]
        assert [problem.partition(": ")[0] for problem in problems] == ["4", "5"]
        assert "did you mean 'fake'" in problems[0]
        refusal = await desk.refused("POST", f"/drafts/{report['version']}/apply")
        assert "2 mistakes" in refusal
        assert desk.path.read_text() == a_file()


async def test_what_only_starting_its_backends_would_show_is_a_mistake_too(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        pool = "own: {kind: vllm, at: 'https://x:1', model: m, tls: {ca: /not/there.pem}}"
        report = await desk.draft(a_file(pool))
        assert len(report["problems"]) == 1
        assert "/not/there.pem" in report["problems"][0]
        assert "/not/there.pem" in await desk.refused("POST", f"/drafts/{report['version']}/apply")


async def test_a_draft_is_not_applied_over_a_file_that_has_changed(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        report, base = await desk.draft(a_file(more=", drain: 9s")), desk.in_effect
        by_hand = a_file(more=", drain: 7s")
        desk.path.write_text(by_hand)
        apply = f"/drafts/{report['version']}/apply"
        message = f"has version {version_of(by_hand)} by now, not {base}"
        assert message in await desk.refused("POST", apply)
        assert message in await desk.refused("POST", apply, headers={"If-Match": f'"{base}"'})
        assert desk.path.read_text() == by_hand
        status, _ = await desk.call("POST", apply, headers={"If-Match": f'"{version_of(by_hand)}"'})
        assert (status, desk.in_effect) == (200, report["version"])


async def test_what_needs_a_restart_is_named_and_written_only_when_that_is_wanted(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        text, first = a_file(more=", decision_log: '-', drain: 9s"), desk.in_effect
        report = await desk.draft(text)
        (line,) = report["restart"]
        assert "server.decision_log: cannot change while the router runs" in line
        apply = f"/drafts/{report['version']}/apply"
        assert "changes that need a restart" in await desk.refused("POST", apply)
        assert desk.path.read_text() == a_file()
        done = await desk.call("POST", f"{apply}?restart=true")
        assert done == (200, {"version": version_of(text), "before": first, "in_effect": False})
        assert (desk.path.read_text(), desk.in_effect) == (text, first)


async def test_a_draft_brings_no_command_that_the_router_would_run(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        pool = "own: {kind: vllm, register: true, model: m, wake: {within: 1m, command: [touch, /tmp/x]}}"
        report = await desk.draft(a_file(pool))
        for query in ("", "?restart=true"):
            refusal = await desk.refused("POST", f"/drafts/{report['version']}/apply{query}")
            assert (
                "the draft has a new command to wake a pool: touch /tmp/x (write it into the file by hand)" in refusal
            )
        assert desk.path.read_text() == a_file()


async def test_a_file_that_cannot_be_written_says_so_and_gives_the_text(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        report = await desk.draft(a_file(more=", drain: 9s"))
        (tmp_path / "..data").symlink_to(tmp_path)
        refusal = await desk.refused("POST", f"/drafts/{report['version']}/apply")
        assert "mounted from a ConfigMap" in refusal
        assert (await desk.call("GET", f"/drafts/{report['version']}/text"))[1] == a_file(more=", drain: 9s")


async def test_drafts_are_few_and_can_be_dropped(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        made = [(await desk.draft(a_file(more=f", drain: {n + 1}s")))["version"] for n in range(MOST_DRAFTS + 2)]
        listed = (await desk.call("GET", "/drafts"))[1]["drafts"]
        assert [each["version"] for each in listed] == list(reversed(made[2:]))
        assert (await desk.call("DELETE", f"/drafts/{made[-1]}"))[0] == 200
        assert "there is no draft" in await desk.refused("GET", f"/drafts/{made[-1]}")
        assert (await desk.call("GET", f"/drafts/{made[-2]}"))[1]["version"] == made[-2]


@pytest.mark.parametrize(
    ("method", "path", "sent", "words"),
    [
        ("POST", "/drafts", {"data": b""}, "the draft is empty"),
        ("POST", "/drafts", {"data": b"\xff"}, "the draft is no text in UTF-8"),
        ("POST", "/drafts/abc/apply?restart=yes", {}, "restart must be true or false"),
        ("POST", "/drafts/abc/apply", {}, "there is no draft 'abc'"),
        ("POST", "/rollback?restart=yes", {}, "restart must be true or false"),
        ("POST", "/rollback", {"json": {"versio": "x"}}, "did you mean 'version'"),
        ("POST", "/rollback", {"json": {"version": 3}}, "version must be text"),
        ("POST", "/rollback", {}, "no earlier version is kept"),
        ("POST", "/rollback", {"json": {"version": "abc"}}, "version 'abc' is not kept"),
        ("GET", "/history/abc", {}, "version 'abc' is not kept"),
        ("DELETE", "/drafts/abc", {}, "there is no draft 'abc'"),
    ],
)
async def test_a_wrong_call_says_what_is_wrong(
    method: str, path: str, sent: dict[str, Any], words: str, tmp_path: Path
) -> None:
    async with a_desk(tmp_path) as desk:
        assert words in await desk.refused(method, path, **sent)


async def test_the_router_takes_back_a_file_that_turns_out_to_be_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_desk(tmp_path) as desk:
        report = await desk.draft(a_file(more=", drain: 9s"))
        assert desk.router.reloader is not None

        async def refuse() -> str:
            return "a certificate is gone"

        monkeypatch.setattr(desk.router.reloader, "reload", refuse)
        refusal = await desk.refused("POST", f"/drafts/{report['version']}/apply")
        assert "a certificate is gone" in refusal
        assert desk.path.read_text() == a_file()


async def test_the_command_line_does_the_same(tmp_path: Path) -> None:
    async with a_desk(tmp_path) as desk:
        await desk.ask()
        commands, new = ConfigCommands(AdminPort(str(desk.router.admin), None)), tmp_path / "new.yaml"
        new.write_text(a_file(f"{OWN}, {MORE}", "{class: chat, pools: more}"))
        report, lines = await asyncio.to_thread(commands.draft, new)
        assert lines[0] == f"draft {report.version} is sound; version {report.running} is in effect"
        assert "  new: more-0" in lines
        assert "  1 of 1 would be decided differently" in lines
        assert "draft " in (await asyncio.to_thread(commands.history))[0]
        assert await asyncio.to_thread(commands.show, report.version) == new.read_text()
        said = await asyncio.to_thread(lambda: commands.apply(report.version, expected=None, for_restart=False))
        assert said == f"version {report.version} is in effect; {report.running} before"
        assert await asyncio.to_thread(commands.show, None) == new.read_text()
        assert await asyncio.to_thread(commands.show, report.running) == a_file()
        said = await asyncio.to_thread(lambda: commands.roll_back(None, for_restart=False))
        assert said == f"version {report.running} is in effect; {report.version} before"
