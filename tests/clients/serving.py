"""A router in front of a stand-in, for clients that are not among our own dependencies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from policies.sla.parse import parse
from router.start.app import Router
from tests.standins.anthropic import AnthropicServer
from tests.standins.ollama import OllamaServer
from tests.standins.standin import StandIn, running
from tests.standins.vllm import VLLMServer

KEY = "client-key"
MODEL = "gpt-4o"
"""A name that clients know, since some look models up in lists of their own."""
ARGUMENTS = '{"at": "Köln"}'
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}

SLA = """
tenants: {{acme: {{keys: ["${{env:CLIENT_KEY}}"]}}}}
pools:
  own:
    kind: {kind}
    at: ["{url}"]
    models: {{gpt-4o: m, text-embedding-3-small: m, claude: m}}
    key: "${{env:THEIR_KEY}}"
server: {{http: "127.0.0.1:0", grpc: "127.0.0.1:0"}}
"""

SERVERS: dict[str, Callable[[], StandIn]] = {
    "vllm": lambda: VLLMServer(arguments=ARGUMENTS),
    "ollama": lambda: OllamaServer(calls=(("weather", {"at": "Köln"}),)),
    "anthropic": lambda: AnthropicServer(arguments=ARGUMENTS, key="theirs"),
}
"""Three dialects; each calls the first tool that it is given."""

KINDS = pytest.mark.parametrize("kind", SERVERS)


@asynccontextmanager
async def a_router(kind: str = "vllm") -> AsyncIterator[str]:
    """The address of a router with one backend of `kind`."""
    async with running(SERVERS[kind]()) as server:
        environment = {"CLIENT_KEY": KEY, "THEIR_KEY": "theirs"}
        config = parse(SLA.format(kind=kind, url=server.url), environment=environment)
        async with Router(config) as router:
            assert await router.wait_until_reached(10)
            yield router.http_url
            router.check()
