"""Stand-ins for engines that cannot run here: small servers that speak an engine's documented wire format.

They know no model: a byte of a prompt is one of its tokens, the answer is always the same text, one token a character.
Each can be run by hand: `python -m tests.standins.openai_compatible --port 8090`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from aiohttp import web
from aiohttp.test_utils import TestServer

Server = TypeVar("Server", bound="StandIn")

TEXT = "Grüße, 世界 😀!"


class Seen(NamedTuple):
    """One request that came in. Names of `headers` are in lower case."""

    path: str
    body: Any
    headers: Mapping[str, str]


@dataclass(eq=False)
class StandIn(ABC):
    """The next answers, and the received requests.

    `hangs_after` pieces of an answer nothing follows. `cut_bytes` is the size in which bodies are written. `is_busy`
    refuses as the engine does when it is full; `is_ill` fails its health check. `open_requests` are generations that
    go on: one ends when it is finished, or when the client is gone.
    """

    text: str = TEXT
    delay_s: float = 0.0
    hangs_after: int | None = None
    cut_bytes: int | None = None
    context_tokens: int = 4096
    cached_tokens: int = 0
    is_busy: bool = False
    is_ill: bool = False
    model: str = "m"
    key: str | None = None
    received: list[Seen] = field(default_factory=list)
    open_requests: int = 0
    url: str = ""

    @abstractmethod
    def routes(self) -> Iterable[web.RouteDef]:
        """The routes of its calls."""

    def app(self) -> web.Application:
        """The server, not started."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(self.routes())
        return app

    async def seen(self, request: web.Request) -> Any:
        """The JSON of `request`, remembered."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Seen(request.path, await request.json(), headers))
        return self.received[-1].body

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A generation that goes on until the body ends."""
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1

    async def pieces(self, most: int | None) -> AsyncIterator[str]:
        """The answer, at most `most` tokens of it, hanging where it should."""
        for at, piece in enumerate(self.text[:most]):
            if at == self.hangs_after:
                await asyncio.Event().wait()
            await asyncio.sleep(self.delay_s)
            yield piece

    def finish(self, most: int | None) -> str:
        """Why an answer of at most `most` tokens ended."""
        return "length" if most is not None and most < len(self.text) else "stop"

    async def begin(self, request: web.Request, content_type: str = "text/event-stream") -> web.StreamResponse:
        """A streamed reply, its head sent."""
        reply = web.StreamResponse(headers={"content-type": content_type})
        await reply.prepare(request)
        return reply

    async def write(self, reply: web.StreamResponse, data: bytes) -> None:
        """Send `data`, in cuts."""
        size = self.cut_bytes or len(data)
        for at in range(0, len(data), size):
            await reply.write(data[at : at + size])


def event(chunk: object) -> bytes:
    """`chunk` as a server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def tokens_in(prompt: Any) -> int:
    """Number of tokens of `prompt`: text, token ids, or messages."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    if all(isinstance(item, int) for item in prompt):
        return len(prompt)
    texts = (part if isinstance(part, str) else part.get("text", part.get("content")) or "" for part in prompt)
    return sum(map(tokens_in, texts))


@asynccontextmanager
async def running(standin: Server) -> AsyncIterator[Server]:
    """`standin`, served on loopback."""
    server = TestServer(standin.app(), handler_cancellation=True)
    await server.start_server()
    standin.url = str(server.make_url("")).rstrip("/")
    try:
        yield standin
    finally:
        await server.close()


def serve(kind: type[StandIn], port: int) -> None:
    """Run a stand-in of `kind` until it is interrupted, as the command line says."""
    parser = argparse.ArgumentParser(description=kind.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port, help="default: %(default)s, the engine's own")
    parser.add_argument("--model", default="m", help="the model's name")
    parser.add_argument("--key", help="the API key that callers must send")
    parser.add_argument("--text", default=TEXT, help="what every answer says")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds before each token")
    chosen = parser.parse_args()
    standin = kind(text=chosen.text, delay_s=chosen.delay, model=chosen.model, key=chosen.key)
    web.run_app(standin.app(), host=chosen.host, port=chosen.port, handler_cancellation=True)
