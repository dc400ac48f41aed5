"""End users named by clients: each has the limits of its tenant's end users alone."""

from __future__ import annotations

from typing import Any

import pytest

from policies.nouns import Limits
from tests.router.parts import CHAT, a_chat, a_client, a_config, a_router, a_tenant

MESSAGES = "/v1/messages"


async def test_each_user_of_a_tenant_has_its_limits_alone() -> None:
    tenant = a_tenant(user_limits=Limits(requests_per_minute=1))
    async with a_router(config=a_config(tenant)) as router, a_client(router) as client:
        asked = [await client.answer(CHAT, a_chat(user=user)) for user in ("ann", "bob", "ann")]
        assert [status for status, _ in asked] == [200, 200, 429]
        message = "user 'ann' of tenant 'acme' has reached its limit of 1 requests a minute"
        assert message in asked[2][1]["error"]["message"]
        # without a name, the tenant's own limits hold alone
        assert [(await client.answer(CHAT, a_chat()))[0] for _ in range(2)] == [200, 200]


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {}), (CHAT, {"user": ""}), (MESSAGES, {"max_tokens": 5}), (MESSAGES, {"max_tokens": 5, "metadata": {}})],
)
async def test_a_tenant_may_require_a_user(path: str, fields: dict[str, Any]) -> None:
    async with a_router(config=a_config(a_tenant(needs_user=True))) as router, a_client(router) as client:
        status, reply = await client.answer(path, a_chat(**fields))
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        assert "must name their end user" in reply["error"]["message"]
        named = {**fields, "user": "ann"} if path == CHAT else {**fields, "metadata": {"user_id": "ann"}}
        assert (await client.answer(path, a_chat(**named)))[0] == 200
