from __future__ import annotations

import pytest

from router.protocols.http.endpoints import _is_an_id
from tests.router.parts import MODEL, ScriptedBackend, a_client, a_router


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [MODEL, "unknown"])
async def test_a_client_gets_its_own_id_back_and_the_routers_beside_it(model: str, stream: bool) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    async with (
        a_router(ScriptedBackend()) as router,
        a_client(router) as client,
        client.post("/v1/chat/completions", body, headers={"x-request-id": "mine-1"}) as reply,
    ):
        own = reply.headers["x-pointsman-request"]
        assert (reply.headers["x-request-id"], reply.headers["request-id"]) == ("mine-1", own)
        assert own != "mine-1"


@pytest.mark.parametrize(
    ("given", "is_one"),
    [("a", True), ("0" * 128, True), ("a b:c/d", True), ("", False), ("0" * 129, False), ("é", False), ("a\tb", False)],
)
def test_only_short_printable_ids_are_kept(given: str, is_one: bool) -> None:
    assert _is_an_id(given) is is_one
