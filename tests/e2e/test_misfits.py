"""A backend that lacks what others of its pool have is passed over; what no backend has is refused as it was."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.start.app import Router
from tests.e2e.raw_engine import RawEngine, begun, routed, saying, served, whole
from tests.e2e.test_bad_answers import END, OK, text_chunk

REFUSALS = {
    403: (b'{"error":{"message":"Project does not have access to model"}}', 400),
    404: (b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError"}}', 400),
    405: (b'{"detail":"Method Not Allowed"}', 501),
    410: (b'{"error":{"message":"This model was retired"}}', 400),
    501: (b'{"error":{"message":"Not Implemented"}}', 501),
}


def ill(router: Router) -> list[str]:
    cluster = router.gateway.cluster
    return [name for name in cluster.names() if cluster.is_ill(name)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("status", REFUSALS)
async def test_what_one_backend_lacks_is_answered_by_another_one(status: int, path: str, stream: bool) -> None:
    answer = saying(begun() + text_chunk("hi") + END, closes=True) if stream else saying(whole(OK))
    lacks, has = RawEngine(saying(whole(REFUSALS[status][0], status))), RawEngine(answer)
    async with served(lacks, has), routed(lacks, has) as (router, ask):
        for number in range(60):
            assert (await ask(f"question {number}", path=path, stream=stream))[0] == 200
            if ill(router):
                break
        assert ill(router) == ["own-0"], "it takes requests that it cannot answer"
        assert "refuses" in router.gateway.cluster.trouble("own-0").reason  # type: ignore[union-attr]
        router.check()


@pytest.mark.parametrize("status", REFUSALS)
async def test_what_no_backend_has_is_refused_and_makes_none_ill(status: int) -> None:
    body, shown = REFUSALS[status]

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, asked: Any) -> None:
        writer.write(whole(body, status) if "odd" in json.dumps(asked) else whole(OK))

    engines = [RawEngine(says) for _ in range(2)]
    async with served(*engines), routed(*engines) as (router, ask):
        for number in range(8):
            for key in ({}, {"key": "other-key"}):
                got, answer, _ = await ask(f"odd {number}", **key)
                assert got == shown, answer
        assert not ill(router)
        assert sum(len(engine.bodies) for engine in engines) == 2 * 16, "each backend once"
        assert (await ask("usual"))[0] == 200
        router.check()


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_a_clients_own_mistake_is_tried_nowhere_else(status: int) -> None:
    engines = [RawEngine(saying(whole(b'{"error":{"message":"bad value"}}', status))) for _ in range(2)]
    async with served(*engines), routed(*engines) as (router, ask):
        assert (await ask())[0] == 400
        assert sum(len(engine.bodies) for engine in engines) == 1
        assert not ill(router)
