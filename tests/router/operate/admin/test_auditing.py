"""What operators do, and logins that are refused, are recorded; the log is read by owners."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from policies.sla.parse import parse
from router.operate.audit.chain import Chain
from router.operate.audit.reader import checked
from router.start.app import Router
from tests.router.fleet.feeds.waiting import until
from tests.router.operate.admin.test_roles import a_file, an_admin
from tests.router.parts import CHAT, ScriptedBackend, a_chat
from tests.router.start.test_reload import Paper


def audited(tmp_path: Path) -> str:
    keys = "server:\n  keys_file: " + str(tmp_path / "keys.jsonl")
    return a_file(more=f"audit: {{file: {tmp_path / 'audit.log'}}}\n").replace("server:", keys, 1)


def records(tmp_path: Path) -> list[dict[str, Any]]:
    found = list(checked(tmp_path / "audit.log", Chain()))
    assert all(each.problem is None for each in found)
    return [each.record for each in found]


def as_role(role: str) -> dict[str, str]:
    return {"authorization": f"Bearer {role}"}


async def test_every_change_is_recorded_before_its_reply_with_its_operator_and_its_result(tmp_path: Path) -> None:
    async with an_admin(audited(tmp_path)) as (_, http):
        async with http.patch("/admin/backends/b0", json={"draining": True}, headers=as_role("operator")) as reply:
            assert reply.status == 200
        names = ("event", "name", "role", "by", "address", "call", "path", "asked", "status")
        last = records(tmp_path)[-1]
        assert {name: last[name] for name in names} == {
            "event": "call",
            "name": "oscar",
            "role": "operator",
            "by": "key",
            "address": "127.0.0.1",
            "call": "PATCH /admin/backends/{name:path}",
            "path": "/admin/backends/b0",
            "asked": {"draining": True},
            "status": 200,
        }
        async with http.patch("/admin/backends/b0", json={"draining": False}, headers=as_role("viewer")) as reply:
            assert reply.status == 403
        assert (records(tmp_path)[-1]["name"], records(tmp_path)[-1]["status"]) == ("vera", 403)
        before = len(records(tmp_path))
        async with http.get("/admin/config", headers=as_role("viewer")) as reply:
            assert reply.status == 200
        assert len(records(tmp_path)) == before, "reading is not recorded"


async def test_keys_are_recorded_by_their_ids_and_never_themselves(tmp_path: Path) -> None:
    async with an_admin(audited(tmp_path)) as (_, http):
        async with http.post("/admin/tenants/acme/keys", json={"name": "ci"}, headers=as_role("owner")) as reply:
            made = await reply.json()
        path = f"/admin/tenants/acme/keys/{made['id']}"
        async with http.post(f"{path}/rotate", json={}, headers=as_role("owner")) as reply:
            rotated = await reply.json()
        async with http.delete(path, headers=as_role("owner")) as reply:
            assert reply.status == 200
    calls = [record for record in records(tmp_path) if record["event"] == "call"]
    assert [(call["call"].split()[0], call.get("made")) for call in calls] == [
        ("POST", made["id"]),
        ("POST", rotated["id"]),
        ("DELETE", None),
    ]
    text = (tmp_path / "audit.log").read_text()
    for secret in (made["key"], rotated["key"], "owner-key"):
        assert secret not in text


async def test_refused_logins_of_operators_and_clients_are_recorded(tmp_path: Path) -> None:
    async with an_admin(audited(tmp_path)) as (router, http):
        for _ in range(3):
            async with http.get("/admin/config", headers=as_role("guess")) as reply:
                assert reply.status == 401
        async with aiohttp.ClientSession(router.http_url) as client:
            for key in ("wrong", "pm_wrong", None):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                async with client.post(CHAT, json=a_chat(), headers=headers) as reply:
                    assert reply.status == 401
            async with client.get("/metrics", headers=as_role("guess")) as reply:
                assert reply.status == 401
    refused = [record for record in records(tmp_path) if record["event"] == "refused"]
    assert {(each["port"], each["address"], each["reason"], each["count"]) for each in refused} == {
        ("admin", "127.0.0.1", "the admin key is not known", 3),
        ("clients", "127.0.0.1", "the API key is not known", 2),
        ("clients", "127.0.0.1", "the admin key is not known", 1),
    }
    assert "guess" not in (tmp_path / "audit.log").read_text()


async def test_a_file_that_is_reloaded_or_rejected_is_recorded(tmp_path: Path) -> None:
    paper = Paper(audited(tmp_path))
    contents = paper.read()
    async with Router(contents.config, backends=lambda _: [ScriptedBackend()], file=contents) as router:
        assert router.reloader is not None
        paper.text = audited(tmp_path) + "queue: {most: 7}\n"
        assert await router.reloader.reload() is None
        paper.text = "classes: [oops]\n"
        assert await router.reloader.reload() is not None
        version = router.gateway.config.version
    configs = [record for record in records(tmp_path) if record["event"] == "config"]
    assert [(each["accepted"], each.get("version")) for each in configs] == [(True, version), (False, None)]
    assert "classes" in configs[1]["reason"]


async def test_owners_read_the_newest_records_and_page_back(tmp_path: Path) -> None:
    async with an_admin(audited(tmp_path)) as (_, http):
        for number in range(5):
            async with http.patch("/admin/backends/b0", json={"weight": number + 1}, headers=as_role("owner")) as reply:
                assert reply.status == 200

        async def read(query: str) -> Any:
            async with http.get(f"/admin/audit?{query}", headers=as_role("owner")) as reply:
                return reply.status, await reply.json()

        status, found = await read("event=call&limit=2")
        assert (status, [each["asked"]["weight"] for each in found["records"]]) == (200, [5, 4])
        _, found = await read(f"event=call&limit=2&before={found['records'][-1]['seq']}")
        assert [each["asked"]["weight"] for each in found["records"]] == [3, 2]
        assert (await read("from=2100-01-01"))[1] == {"records": []}
        assert len((await read("to=2100-01-01"))[1]["records"]) == 6
        for query, words in (
            ("limit=x", "limit must be a whole number"),
            ("form=2026-01-01", "there is no parameter 'form' (did you mean 'from'?)"),
            ("from=yesterday", "'yesterday' is no time"),
        ):
            status, found = await read(query)
            assert status == 400
            assert words in found["error"]["message"]


async def test_without_an_audit_log_the_call_says_how_to_have_one() -> None:
    async with an_admin(a_file()) as (_, http), http.get("/admin/audit", headers=as_role("owner")) as reply:
        assert (reply.status, (await reply.json())["error"]["message"]) == (
            400,
            "this router keeps no audit log (write audit: {file: audit.log})",
        )


async def test_nothing_is_changed_while_the_log_cannot_be_written(tmp_path: Path) -> None:
    async with an_admin(audited(tmp_path)) as (router, http):
        assert router.operations.audit is not None
        router.operations.audit.trouble = "no space left"
        async with http.patch("/admin/backends/b0", json={"draining": True}, headers=as_role("owner")) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (503, "overloaded")
        assert not any(view.draining for view in router.gateway.cluster.view(0.0).backends)
        async with http.get("/admin/config", headers=as_role("owner")) as reply:
            assert reply.status == 200
        router.operations.audit.trouble = None


async def test_a_body_of_any_size_is_recorded_in_short(tmp_path: Path) -> None:
    async with an_admin(audited(tmp_path)) as (_, http):
        body = {"name": "x" * 9000}
        async with http.post("/admin/tenants/acme/keys", json=body, headers=as_role("owner")) as reply:
            assert reply.status == 400
    assert records(tmp_path)[-2]["asked"] == {"bytes": 9011}


async def test_without_keys_the_operator_is_this_machine(tmp_path: Path) -> None:
    config = parse(audited(tmp_path))
    config = replace(config, server=replace(config.server, admin_key_hashes=frozenset(), operators={}))
    async with (
        Router(config, backends=lambda _: [ScriptedBackend()]) as router,
        aiohttp.ClientSession(f"http://{router.admin}") as http,
    ):
        await router.wait_until_reached(5)
        async with http.patch("/admin/backends/b0", json={"draining": True}) as reply:
            assert reply.status == 200
    call = next(record for record in records(tmp_path) if record["event"] == "call")
    assert (call["name"], call["role"], call["by"]) == ("this machine", "owner", "no key")


async def test_a_client_that_leaves_is_recorded_all_the_same(tmp_path: Path) -> None:
    async with an_admin(audited(tmp_path)) as (router, http):
        began = asyncio.Event()

        async def slow(*_: object) -> Any:
            began.set()
            await asyncio.Event().wait()

        router.gateway.prefixes.drop_domain = slow  # type: ignore[method-assign]
        call = asyncio.create_task(http.delete("/admin/tenants/acme/cache", headers=as_role("owner")).__aenter__())
        await began.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: any(record["event"] == "call" for record in records(tmp_path)))
    [record] = [record for record in records(tmp_path) if record["event"] == "call"]
    assert record["status"] == 0
