"""Every call of the admin port and its answer for each role, from the routes themselves.

`python -m tests.router.operate.admin.test_roles` prints the table of docs/operating.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from policies.sla.parse import parse
from router.operate.admin.calls import CALLS, call_of
from router.operate.admin.server import ROLE_HEADER, AdminEndpoints
from router.operate.dashboard.routes import PAGE
from router.operate.operations import Operations
from router.protocols.registration.announcements import add_announcements
from router.protocols.registration.fastchat_controller import FastChatController, FastChatPools
from router.protocols.registration.fastchat_workers import Workers
from router.start.app import Router
from router.start.build import build
from tests.router.identity.local_issuer import LocalIssuer, a_local_issuer
from tests.router.parts import ScriptedBackend, a_config

OPERATING = Path(__file__).parents[4] / "docs" / "operating.md"
ROLES = ("viewer", "operator", "owner")
VALUES = {
    "tenant": "acme",
    "id": "0123456789ab",
    "name:path": "b0",
    "name": "batch_1",
    "number": "1",
    "version": "0123456789ab",
}
FILE = """
tenants: {acme: {keys: ["sha256:%s"]}}
pools: {own: {kind: fake, model: tiny}}
server:
  http: "127.0.0.1:0"
  grpc: off
  admin: "127.0.0.1:0"
  admin_keys:
    - {key: "sha256:%s", role: viewer, name: vera}
    - {key: "sha256:%s", role: operator, name: oscar}
    - "sha256:%s"
"""


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def a_file(issuer: LocalIssuer | None = None, more: str = "") -> str:
    text = FILE % tuple(map(hashed, ("client", *ROLES))) + more
    rules = [f"{{when: {{claims: {{groups: {role}s}}}}, role: {role}}}" for role in ROLES]
    client = "{when: {claims: {groups: clients}}, tenant: acme}"
    return text if issuer is None else text + issuer.section(client, *rules)


@asynccontextmanager
async def an_admin(text: str) -> AsyncIterator[tuple[Router, aiohttp.ClientSession]]:
    async with (
        Router(parse(text), backends=lambda _: [ScriptedBackend()]) as router,
        aiohttp.ClientSession(f"http://{router.admin}") as http,
    ):
        assert await router.wait_until_reached(5)
        yield router, http


def routes_of(operations: Operations) -> list[tuple[str, str]]:
    """Method and path of every call of the port, as the router adds them."""
    endpoints = AdminEndpoints(operations, None)
    add_announcements(endpoints.routes, operations.gateway.fleet)
    controller = FastChatController(Workers(FastChatPools(operations.gateway.fleet), operations.gateway.clock))
    controller.add_to(endpoints.routes)
    return sorted(endpoints.routes.every(), key=lambda call: (call[1], call[0]))


def sent(path: str) -> str:
    """`path` with values in place of its variables."""
    return re.sub(r"\{([\w:]+)\}", lambda found: VALUES[found[1]], path)


async def status(http: aiohttp.ClientSession, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with http.request(method, sent(path), headers=headers, json={}, allow_redirects=False) as reply:
        if reply.status not in (401, 403) and key is not None and path.startswith("/admin"):
            assert reply.headers[ROLE_HEADER] in ROLES
        return reply.status


async def test_every_call_asks_for_its_role_with_keys_and_with_tokens() -> None:
    async with a_local_issuer("ES256") as issuer, an_admin(a_file(issuer)) as (router, http):
        tokens = {role: issuer.token(groups=[f"{role}s"]) for role in ROLES}
        for method, path in routes_of(router.operations):
            needed = call_of(method, path).role
            for level, role in enumerate(ROLES, start=1):
                for shown in (role, tokens[role]):
                    got = await status(http, method, path, shown)
                    may = needed is None or level >= needed
                    assert (got not in (401, 403)) == may, f"{role}: {method} {path}: {got}"
                    assert may or got == 403
            for stranger in (None, "a guess", issuer.token(groups=["owners"], exp=1)):
                assert (await status(http, method, path, stranger) == 401) == (needed is not None), f"{method} {path}"
            # a client is no operator
            for client in ("client", issuer.token(groups=["clients"])):
                expected = {401, 403} if needed is not None else {200, 302}
                assert await status(http, method, path, client) in expected


def test_every_call_is_in_the_table_and_every_entry_is_a_call() -> None:
    routes = {f"{method} {path}" for method, path in routes_of(build(a_config(), backends=lambda _: []))}
    assert {name for name in routes if not name.startswith(f"GET {PAGE}")} == set(CALLS)


def test_what_changes_something_is_recorded() -> None:
    for name, call in CALLS.items():
        is_read = name.startswith("GET ") or name == "POST /admin/explain"
        is_of_backends = not name.partition(" ")[2].startswith("/admin")
        assert call.changes == (not is_read and not is_of_backends), name


def test_a_viewer_gets_no_sums_by_key_or_end_user() -> None:
    class Asked:
        target = "/admin/usage?by=tenant,user"
        query = "by=tenant,user"

    wanted: Any = Asked()
    assert str(CALLS["GET /admin/usage"].role_for(wanted)) == "operator"
    wanted.query = "by=tenant"
    assert str(CALLS["GET /admin/usage"].role_for(wanted)) == "viewer"


@pytest.mark.parametrize("port", ["admin", "http"])
async def test_metrics_are_for_every_role(port: str) -> None:
    async with a_local_issuer("ES256") as issuer, an_admin(a_file(issuer)) as (router, _):
        url = f"http://{router.admin}" if port == "admin" else router.http_url
        async with aiohttp.ClientSession(url) as http:
            assert await status(http, "GET", "/metrics", issuer.token(groups=["viewers"])) == 200
            for shown, got in (("viewer", 200), ("client", 401), (None, 401)):
                async with http.get("/metrics", headers={"authorization": f"Bearer {shown}"} if shown else {}) as reply:
                    assert reply.status == got
                    assert (got == 401) == ("WWW-Authenticate" in reply.headers)


async def test_the_answer_names_the_role_that_is_needed() -> None:
    async with (
        an_admin(a_file()) as (_, http),
        http.patch("/admin/backends/b0", json={}, headers={"authorization": "Bearer viewer"}) as reply,
    ):
        assert (reply.status, (await reply.json())["error"]["message"]) == (
            403,
            "this needs the role operator (your role is viewer)",
        )


async def test_a_token_without_a_role_is_no_operator() -> None:
    async with a_local_issuer("ES256") as issuer, an_admin(a_file(issuer)) as (_, http):
        headers = {"authorization": f"Bearer {issuer.token(groups=['sales'])}"}
        async with http.get("/admin/config", headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (403, "permission_denied")
            assert 'error="insufficient_scope"' in reply.headers["WWW-Authenticate"]


def rows() -> Iterator[str]:
    """The table of the page."""
    yield "| call | no key | viewer | operator | owner | recorded |"
    yield "|---|---|---|---|---|---|"
    for name, call in CALLS.items():
        needed = call.role
        cells = ["✓" if needed is None else "401"]
        cells += ["✓" if needed is None or level >= needed else "403" for level in (1, 2, 3)]
        yield f"| `{name}` | {' | '.join(cells)} | {'yes' if call.changes else ''} |"


def test_the_page_has_the_table() -> None:
    assert "\n".join(rows()) in OPERATING.read_text()


if __name__ == "__main__":
    print("\n".join(rows()))
