"""An engine of OpenAI's dialect that answers posts with any bytes, or none: what real ones do only when they break."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from policies.sla.parse import parse
from router.start.app import Router
from tests.router.parts import KEY


def key_hash(key: str) -> str:
    """What an SLA file has of `key`."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


MODELS = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 32768}]}).encode()

Says = Callable[["RawEngine", asyncio.StreamWriter, Any], Awaitable[None]]
"""Writes the answer to a post with this body, whole, or closes the connection."""


@dataclass(eq=False)
class RawEngine:
    """Answers each post with what `says` says; `bodies` are those that came, `keys` the headers of their keys."""

    says: Says
    models: bytes = MODELS
    document: bytes = b"{}"
    """Its OpenAPI document."""
    bodies: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        if (task := asyncio.current_task()) is not None:
            self.tasks.add(task)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                fields = [line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line]
                lines = {name.lower(): value for name, value in fields}
                body = await reader.readexactly(int(lines.get("content-length", 0)))
                if head.startswith("GET /v1/models"):
                    writer.write(whole(self.models))
                elif head.startswith("GET /openapi.json"):
                    writer.write(whole(self.document))
                elif head.startswith("GET"):
                    writer.write(whole(b"{}", status=200 if head.startswith("GET /health") else 404))
                else:
                    self.bodies.append(json.loads(body))
                    self.keys.append(lines.get("authorization", lines.get("x-api-key", "")))
                    await self.says(self, writer, self.bodies[-1])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def end(self) -> None:
        """End all connections."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def until(is_so: Callable[[], object]) -> None:
    """Return once `is_so`."""
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def whole(body: bytes, status: int = 200, **headers: str) -> bytes:
    """A reply in one piece."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return head.encode() + body


def begun() -> bytes:
    """The head of a stream that ends with its connection."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def saying(reply: bytes, *, closes: bool = False, after_s: float = 0.0) -> Says:
    """Answer every post with `reply`."""

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        await asyncio.sleep(after_s)
        writer.write(reply)
        if closes:
            await writer.drain()
            writer.close()

    return says


@asynccontextmanager
async def served(*engines: RawEngine) -> AsyncIterator[None]:
    """The `engines` on ports of loopback."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            server = await asyncio.start_server(engine.talk, "127.0.0.1", 0)
            stack.callback(server.close)
            stack.push_async_callback(engine.end)
            engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield


@asynccontextmanager
async def routed(
    *engines: RawEngine,
    kind: str = "openai_compatible",
    pool: str = "",
    tenant: str = "",
    more: str = "",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Router, Ask]]:
    """A router before the `engines`, and a client of it. `pool`, `tenant` and `more` are members of the SLA file."""
    urls = ", ".join(f'"{engine.url}"' for engine in engines)
    sla = f"""
classes: {{chat: {{}}}}
tenants:
  acme: {{keys: ["{key_hash(KEY)}"]{tenant}}}
  other: {{keys: ["{key_hash("other-key")}"]}}
pools: {{own: {{kind: {kind}, model: m, at: [{urls}]{pool}}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
{more}
"""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Router(parse(sla, environment=environment)))
        assert await router.wait_until_reached(10)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield router, Ask(http, router.http_url)


@dataclass
class Ask:
    """A client of the router."""

    http: aiohttp.ClientSession
    url: str

    async def __call__(
        self, text: str = "hi", path: str = "/v1/chat/completions", key: str = KEY, **more: Any
    ) -> tuple[int, bytes, Any]:
        """Status, body and headers of the answer to `text`."""
        body: dict[str, Any] = {"model": "m", "max_tokens": 8}
        if path == "/v1/responses":
            body = {"model": "m", "input": text, "max_output_tokens": 8}
        elif path == "/v1/completions":
            body |= {"prompt": text}
        else:
            body |= {"messages": [{"role": "user", "content": text}]}
        return await self.send(json.dumps(body | more).encode(), path, key)

    async def send(self, raw: bytes, path: str = "/v1/chat/completions", key: str = KEY) -> tuple[int, bytes, Any]:
        """The same for a body as it is."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        async with self.http.post(self.url + path, data=raw, headers=headers) as answer:
            return answer.status, await answer.read(), answer.headers
