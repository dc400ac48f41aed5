"""A server with OpenAI's API: the text of each answer follows from its question, so that no answer passes for another.

`python -m tests.chaos.server --port 8000`; with `--cert` and `--cert-key` it speaks TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.openai_compatible import OpenAIServer

_TEXT: ContextVar[str] = ContextVar("text")

MODES = ("well", "errors", "busy", "stalls", "nonsense", "late", "error event")
"""What it may be told to do: answer; answer 500; answer 429; stop in the middle of each answer; send events that are no
JSON; wait 2 s before each answer; send an error event in the middle of each stream."""


def answer_to(question: str) -> str:
    """The whole answer to `question`: 64 characters, each of them a token."""
    return hashlib.sha256(question.encode()).hexdigest()


def _asked(body: Mapping[str, Any]) -> tuple[str, str]:
    """The question of `body`, and the beginning of the answer that is to be continued."""
    if "messages" not in body:
        return str(body["prompt"]), ""
    texts = {message["role"]: message["content"] for message in body["messages"]}
    question = texts["user"]
    if not isinstance(question, str):
        question = "".join(part["text"] for part in question)
    return question, texts.get("assistant") or ""


@dataclass(eq=False)
class Answering(OpenAIServer):
    """Does what `mode` says, one of MODES. `PUT /mode` sets it; `GET /counts` returns the number of open answers."""

    mode: str = "well"

    def routes(self) -> Iterable[web.RouteDef]:
        return (*super().routes(), web.get("/counts", self.counts), web.put("/mode", self.change))

    async def counts(self, _: web.Request) -> web.Response:
        return web.json_response({"open": self.open_requests})

    async def change(self, request: web.Request) -> web.Response:
        self.mode = await request.text()
        assert self.mode in MODES
        return web.Response()

    async def seen(self, request: web.Request) -> Any:
        body = await super().seen(request)
        self.received.clear()
        question, beginning = _asked(body)
        _TEXT.set(answer_to(question)[len(beginning) :])
        return body

    async def complete(self, request: web.Request) -> web.StreamResponse:
        match self.mode:
            case "errors":
                return self.error(500, "Internal server error")
            case "busy":
                return self.busy()
            case "late":
                await asyncio.sleep(2)
        reply = await super().complete(request)
        if self.mode == "nonsense" and isinstance(reply, web.Response):
            return web.Response(text='{"choices": [', content_type="application/json")
        return reply

    async def pieces(self, most: int | None) -> AsyncIterator[str]:
        text = _TEXT.get()[:most]
        for at, piece in enumerate(text):
            await asyncio.sleep(self.delay_s)
            if self.mode == "stalls" and at == len(text) // 2:
                await asyncio.Event().wait()
            yield piece

    async def write(self, reply: web.StreamResponse, data: bytes) -> None:
        if self.mode == "nonsense":
            data = b'data: {"choices": [\n\n'
        if self.mode == "error event" and b"content" in data:
            data = b'data: {"error": {"message": "out of memory", "type": "server_error", "code": 500}}\n\n'
        await super().write(reply, data)

    def finish(self, most: int | None) -> str:
        return "length" if most is not None and most < len(_TEXT.get()) else "stop"


def main() -> None:
    """Run a server until it is interrupted, as the command line says."""
    parser = argparse.ArgumentParser(description=Answering.__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cert", help="certificate in PEM")
    parser.add_argument("--cert-key", help="its key")
    chosen = parser.parse_args()
    context = None
    if chosen.cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chosen.cert, chosen.cert_key)
    app = Answering(delay_s=0.02).app()
    web.run_app(app, host="127.0.0.1", port=chosen.port, ssl_context=context, handler_cancellation=True)


if __name__ == "__main__":
    main()
