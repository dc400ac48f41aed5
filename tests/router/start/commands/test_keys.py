"""`pointsman keys` at a running router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from policies.errors import ExpectedError
from policies.keys import hash_of, id_of
from router.start.cli import app
from router.start.commands.keys import limits_of
from tests.router.operate.admin.test_issuing import a_desk
from tests.router.parts import KEY


async def keys(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["keys", *arguments])
    if isinstance(done.exception, ExpectedError):
        return 1, "", str(done.exception)
    return done.exit_code, done.stdout, done.stderr


async def test_a_key_is_issued_listed_limited_rotated_and_revoked(tmp_path: Path) -> None:
    async with a_desk(tmp_path / "keys.jsonl") as desk:
        at = ("--admin", str(desk.router.admin))
        code, key, told = await keys(
            *("issue", "acme", "--name", "ci", "--expires", "90d", *at),
            *("--limit", "requests_per_minute=60", "--limit", "budgets.trial=5M"),
        )
        key, id = key.strip(), id_of(hash_of(key.strip()))  # noqa: A001
        assert code == 0
        assert (await desk.chat(key))[0] == 200
        assert told == f"key {id} of acme, shown only now; requests_per_minute 60, budget trial 5000000\n"
        code, table, _ = await keys("list", "acme", *at)
        assert all(word in table for word in (id, "ci", "requests_per_minute 60", "in the file", id_of(hash_of(KEY))))
        code, told, _ = await keys("limits", "acme", id, "--limit", "concurrent=1", *at)
        assert (code, told) == (0, f"key {id} of acme: concurrent 1\n")
        assert await keys("limits", "acme", id, *at) == (0, f"key {id} of acme: no limits of its own\n", "")
        code, second, _ = await keys("rotate", "acme", id, "--overlap", "1h", *at)
        assert (await desk.chat(second.strip()))[0] == 200
        assert await keys("revoke", "acme", id, *at) == (0, f"key {id} of acme is revoked\n", "")
        assert (await desk.chat(key))[0] == 401
        listed = json.loads((await keys("list", "acme", "--json", *at))[1])
        assert [each["from"] for each in listed] == ["api", "file"]


async def test_a_tenant_without_keys_and_mistakes_are_told(tmp_path: Path) -> None:
    async with a_desk(tmp_path / "keys.jsonl") as desk:
        at = ("--admin", str(desk.router.admin))
        assert await keys("list", "labs", *at) == (0, "labs has no keys.\n", "")
        assert "did you mean 'acme'?" in (await keys("list", "acm", *at))[2]
        assert "there is no limit 'requests'" in (await keys("issue", "acme", "--limit", "requests=1", *at))[2]
        assert "comes from the SLA file" in (await keys("limits", "acme", id_of(hash_of(KEY)), *at))[2]
        assert "has no issued key 'x'" in (await keys("revoke", "acme", "x", *at))[2]
        status, body = await desk.call("PATCH", "/admin/tenants/acme/keys/x", {})
        assert (status, body["error"]["param"]) == (400, "limits")
    assert "no reply from" in (await keys("list", "acme", *at))[2]


def test_limits_are_pairs() -> None:
    assert limits_of(["concurrent=1", "budgets.a=5 USD"]) == {"concurrent": "1", "budgets": {"a": {"cost": "5 USD"}}}
    with pytest.raises(ExpectedError, match=r"--limit 'concurrent' is not NAME=VALUE \(write --limit requests"):
        limits_of(["concurrent"])
