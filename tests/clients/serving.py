"""A router in front of a stand-in, for clients that are not among our own dependencies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from policies.parse import parse
from router.app import Router
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

KEY = "client-key"
MODEL = "gpt-4o"
"""A name that clients know, since some look models up in lists of their own."""
ARGUMENTS = '{"at": "Köln"}'
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}

SLA = """
tenants: {{acme: {{keys: ["${{env:CLIENT_KEY}}"]}}}}
pools:
  own: {{kind: vllm, at: ["{url}"], models: {{gpt-4o: m, text-embedding-3-small: m, claude: m}}}}
server: {{http: "127.0.0.1:0", grpc: "127.0.0.1:0"}}
"""


@asynccontextmanager
async def a_router() -> AsyncIterator[str]:
    """The address of a router whose one backend calls the first tool that it is given."""
    async with running(VLLMServer(arguments=ARGUMENTS)) as server:
        config = parse(SLA.format(url=server.url), environment={"CLIENT_KEY": KEY})
        async with Router(config) as router:
            assert await router.wait_until_reached(10)
            yield router.http_url
            router.check()
