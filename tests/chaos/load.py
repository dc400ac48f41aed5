"""A steady load of clients of every dialect, each of which knows the answer that it must get."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp
import grpc

from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.chaos.server import answer_to

KINDS = ("chat stream", "chat", "completion stream", "messages stream", "grpc stream", "grpc", "messages", "completion")
TENANTS = ("acme", "labs")


class End(Enum):
    """How a request ended for its client."""

    WHOLE = "whole"
    REFUSED = "refused"
    """An error status, before anything else."""
    CUT = "cut"
    """An error event, or an error status of gRPC, behind a part of the answer."""
    DISCONNECTED = "disconnected"
    """The connection broke, or none could be made."""
    HUNG = "hung"
    """Nothing ended it in time."""
    LEFT = "left"
    """Its client disconnected, as it had meant to."""
    WRONG = "wrong"
    """Another answer, or a part of one that looks whole: a silent loss."""


class Wrong(Exception):
    """An answer that its client must not accept."""


@dataclass(eq=False)
class Request:
    """One request and its end."""

    number: int
    kind: str
    tenant: str
    router: int
    began_s: float
    end: End | None = None
    ended_s: float = 0.0
    status: str = ""
    backend: str = ""
    text: str = ""
    error: str = ""
    finish: str | None = None
    is_closed_well: bool = False
    usage: tuple[int, int] | None = None
    """Tokens of the prompt, and of the answer, as the client was told."""
    cached: int = 0
    """Tokens of the prompt that came from a cache, as the client was told."""
    id: str = ""
    """Of the request at its router, if the client was told."""
    pieces: int = 0
    """Pieces of text that came in a stream."""
    question: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    """What the body has in addition."""
    leaves_after_s: float | None = None
    """Seconds after which the client disconnects; None: it stays."""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s

    def __repr__(self) -> str:
        end = self.end.value if self.end else "open"
        said = f" {self.status} {self.error[:160]}".rstrip()
        return f"<{self.number} {self.kind} at {self.backend or '-'}: {end} after {self.took_s:.2f} s{said}>"


@dataclass(frozen=True)
class Door:
    """The addresses of one router."""

    http: str
    grpc: str


@dataclass(frozen=True)
class Shape:
    """How much is asked for, and how: `most` tokens each, so many `per_s` seconds, each within `timeout_s`."""

    per_s: float = 20.0
    most: int = 20
    timeout_s: float = 8.0
    grace_s: float = 2.0
    """Seconds beyond its timeout after which a request counts as hung."""
    model: str = "m"
    knows_answers: bool = True
    kinds: tuple[str, ...] = KINDS


@dataclass
class Load:
    """Starts requests at a steady rate, whatever happens to them; `requests` has all that began."""

    doors: list[Door]
    shape: Shape
    keys: dict[str, str]
    numbers: Callable[[], int]
    requests: list[Request] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Requests begin until the context is left, which waits for their ends."""
        async with aiohttp.ClientSession() as http:
            channels = [grpc.aio.insecure_channel(door.grpc, options=_CHANNEL) for door in self.doors]
            try:
                async with asyncio.TaskGroup() as group:
                    beginning = group.create_task(self._begin(group, http, channels))
                    try:
                        yield
                    finally:
                        beginning.cancel()
            finally:
                for channel in channels:
                    await channel.close()

    async def _begin(self, group: asyncio.TaskGroup, http: aiohttp.ClientSession, channels: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            number = self.numbers()
            router = number // len(self.shape.kinds) % len(self.doors)
            kind = self.shape.kinds[number % len(self.shape.kinds)]
            # the same kinds for both tenants
            tenant = TENANTS[(number // len(self.shape.kinds) + number) % 2]
            request = self.request(number, kind, tenant, router)
            self.requests.append(request)
            group.create_task(self._ask(request, http, channels[router]))
            next_at += 1 / self.shape.per_s
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    def request(self, number: int, kind: str, tenant: str, router: int) -> Request:
        """The request with this number, which begins now."""
        return Request(number, kind, tenant, router, time.monotonic(), question=f"Question {number}")

    async def _ask(self, request: Request, http: aiohttp.ClientSession, channel: Any) -> None:
        try:
            most_s = self.shape.timeout_s + self.shape.grace_s
            async with asyncio.timeout(most_s if request.leaves_after_s is None else request.leaves_after_s):
                if request.kind.startswith("grpc"):
                    await self._by_grpc(request, channel)
                else:
                    await self._by_http(request, http)
            request.end = request.end or self._verdict(request)
        except Wrong as error:
            request.end, request.error = End.WRONG, str(error)
        except TimeoutError:
            request.end = End.HUNG if request.leaves_after_s is None else End.LEFT
        except (aiohttp.ClientError, OSError) as error:
            request.end, request.error = End.DISCONNECTED, repr(error)
        except (ValueError, KeyError, TypeError) as error:
            request.end, request.error = End.WRONG, f"unreadable: {error!r}"
        request.ended_s = time.monotonic()

    def _verdict(self, request: Request) -> End:
        """How a request ended of which the answer ended in order, by what came."""
        if request.error:
            return End.CUT
        if not request.is_closed_well or request.finish is None:
            return End.WRONG
        if request.usage is None:
            raise Wrong("no usage")
        expected = answer_to(request.question)[: self.shape.most]
        if self.shape.knows_answers and request.text != expected:
            raise Wrong(f"{request.text!r} instead of {expected!r}")
        if request.usage[1] != self.shape.most and self.shape.knows_answers:
            raise Wrong(f"charged {request.usage[1]} tokens for an answer of {self.shape.most}")
        return End.WHOLE

    async def _by_http(self, request: Request, http: aiohttp.ClientSession) -> None:
        name, _, streamed = request.kind.partition(" ")
        path = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "messages": "/v1/messages"}[name]
        body: dict[str, Any] = {"model": self.shape.model, "max_tokens": self.shape.most, "stream": bool(streamed)}
        if name == "completion":
            body["prompt"] = request.question
        else:
            body["messages"] = [{"role": "user", "content": request.question}]
        if name != "messages":
            body |= {"stream_options": {"include_usage": True}} if streamed else {}
        body |= {"ignore_eos": True, **request.fields}
        headers = {"authorization": f"Bearer {self.keys[request.tenant]}"}
        url = self.doors[request.router].http + path
        async with http.post(url, json=body, headers=headers) as reply:
            request.status, request.id = str(reply.status), reply.headers.get("x-request-id", "")
            request.backend = reply.headers.get("x-pointsman-backend", "")
            if reply.status != 200:
                error = await reply.json()
                request.end, request.error = End.REFUSED, str(error["error"]["message"])
            elif streamed:
                await self._read_events(request, reply, is_messages=name == "messages")
            else:
                self._read_whole(request, await reply.json())

    async def _read_events(self, request: Request, reply: aiohttp.ClientResponse, *, is_messages: bool) -> None:
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if request.is_closed_well or request.error:
                raise Wrong(f"something follows the end: {line[:80]!r}")
            if line.strip() == b"data: [DONE]":
                request.is_closed_well = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                request.error = str(event["error"]["message"])
            elif is_messages:
                self._read_anthropic(request, event)
            else:
                self._read_openai(request, event)

    def _read_openai(self, request: Request, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            delta = choice.get("delta") or choice
            piece = delta.get("content") or delta.get("text") or ""
            request.text += piece
            request.pieces += bool(piece)
            if choice.get("finish_reason"):
                if request.finish is not None:
                    raise Wrong("it finishes twice")
                request.finish = choice["finish_reason"]
        if event.get("usage"):
            self._read_usage(request, event["usage"])

    def _read_anthropic(self, request: Request, event: dict[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self._read_usage(request, event["message"]["usage"])
            case "content_block_delta":
                request.text += event["delta"].get("text", "")
                request.pieces += 1
            case "message_delta":
                request.finish = event["delta"]["stop_reason"]
                self._read_usage(request, event["usage"])
            case "message_stop":
                request.is_closed_well = True

    def _read_whole(self, request: Request, answer: dict[str, Any]) -> None:
        usage = answer["usage"]
        if "content" in answer:
            request.text = "".join(block["text"] for block in answer["content"])
            request.finish = answer["stop_reason"]
        else:
            (choice,) = answer["choices"]
            request.text = choice["message"]["content"] if "message" in choice else choice["text"]
            request.finish = choice["finish_reason"]
        self._read_usage(request, usage)
        request.is_closed_well = True

    def _read_usage(self, request: Request, usage: dict[str, Any]) -> None:
        """Take `usage` of OpenAI's kind, or of Anthropic's, which counts cached tokens apart and may leave them out."""
        if "prompt_tokens" in usage:
            request.usage = (usage["prompt_tokens"], usage["completion_tokens"])
            request.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return
        prompt = request.usage[0] if request.usage else 0
        if usage.get("input_tokens"):
            request.cached = usage.get("cache_read_input_tokens") or 0
            prompt = usage["input_tokens"] + request.cached + (usage.get("cache_creation_input_tokens") or 0)
        request.usage = (prompt, usage["output_tokens"])

    async def _by_grpc(self, request: Request, channel: Any) -> None:
        stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
        messages = pb.Messages(messages=[pb.Message(role="user", content=request.question)])
        asked = pb.GenerateRequest(model=self.shape.model, chat=messages)
        asked.sampling.max_tokens, asked.sampling.ignore_eos = self.shape.most, True
        for name, value in request.fields.items():
            setattr(asked.sampling, name, value)
        metadata = (("authorization", f"Bearer {self.keys[request.tenant]}"),)
        try:
            if request.kind == "grpc":
                reply = await stub.Complete(asked, metadata=metadata, timeout=self.shape.timeout_s)
                (answer,) = reply.answers
                request.text, request.finish, request.backend = (
                    answer.text,
                    answer.finish_reason,
                    reply.placement.backend,
                )
                self._take_usage(request, reply.usage)
            else:
                async for piece in stub.Generate(asked, metadata=metadata, timeout=self.shape.timeout_s):
                    request.text += piece.text
                    request.pieces += bool(piece.text)
                    request.backend = piece.placement.backend or request.backend
                    request.finish = piece.finish_reason or request.finish
                    if piece.HasField("usage"):
                        self._take_usage(request, piece.usage)
            request.is_closed_well = True
        except grpc.aio.AioRpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            request.status, request.error = error.code().name, error.details() or "no details"
            if "pointsman-code" in trailing or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                request.end = End.CUT if request.text else End.REFUSED
            else:
                request.end = End.DISCONNECTED

    def _take_usage(self, request: Request, usage: Any) -> None:
        request.usage = (usage.prompt_tokens, usage.completion_tokens)
        request.cached = usage.cached_tokens


_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
