"""The HTTP side: OpenAI's routes, health, readiness and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from policies.budget import Standing
from policies.errors import ExpectedError, InvalidRequest, RequestTooLarge, UnknownModel
from policies.explain import Explanation
from policies.nouns import Delta, Usage
from router.ask import Ask
from router.caller import CallerGone, Placement
from router.cluster import ServedModel
from router.explanations import as_header
from router.gateway import Gateway
from router.identify import identify, key_in
from router.inbound.openai import CHAT_PATH, COMPLETION_PATH, chat_ask, completion_ask, decode
from router.inbound.openai_answers import (
    Answer,
    ChatDialect,
    Chunks,
    CompletionDialect,
    Dialect,
    Head,
    usage_sum,
    whole_body,
)
from router.inbound.rate_limits import rate_limit_headers
from router.inbound.status import openai_error, retry_after, status_of
from router.pipeline import outer_edge, serve
from router.tracing import w3c_headers

PROGRESS_EVERY_S = 1.0
"""A client whose prompt prefills hears of it so often, as SSE comments, which keeps proxies from giving up."""

INLINE_BYTES = 64 * 2**10
"""Larger bodies are parsed in a thread."""

Parse = Callable[[Mapping[str, Any], Mapping[str, str]], Ask]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
_SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ROUTES_HINT = f"POST {CHAT_PATH} or {COMPLETION_PATH}, GET /v1/models, /healthz, /readyz or /metrics"


def http_app(gateway: Gateway) -> web.Application:
    """The application that serves `gateway`. Run it with `handler_cancellation=True`."""
    app = web.Application(middlewares=[_errors], client_max_size=gateway.config.server.max_body_bytes)
    app[_GATEWAY] = gateway
    app.router.add_post(CHAT_PATH, _chat)
    app.router.add_post(COMPLETION_PATH, _complete)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{id:.+}", _model)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    return app


class HttpCaller:
    """One POST of a client, as the pipeline sees it; streamed or collected."""

    def __init__(self, http: web.Request, gateway: Gateway, *, dialect: Dialect, parse: Parse) -> None:
        self.id, self.key, self.trace = gateway.new_id(), key_in(http.headers), w3c_headers(http.headers)
        self._http, self._gateway, self._dialect, self._parse = http, gateway, dialect, parse
        self._head = Head(dialect.prefix + self.id, gateway.unix_time_s(), "")
        self._ask: Ask | None = None
        self._chunks: Chunks | None = None
        self._answers: list[Answer] = []
        self._usages: dict[int, Usage] = {}
        self._placement: Placement | None = None
        self._explanation: Explanation | None = None
        self._limits: dict[str, str] = {}
        self._response: web.StreamResponse | None = None
        self._seen: set[int] = set()
        self._progress_at = 0.0

    def __repr__(self) -> str:
        return f"<HttpCaller {self.id} {'streaming' if self._response else 'silent'}, {len(self._seen)} prompts seen>"

    async def read(self) -> Ask:
        """The body, parsed."""
        try:
            raw = await self._http.read()
        except web.HTTPRequestEntityTooLarge as error:
            most = self._gateway.config.server.max_body_bytes
            hint = "shorten the prompt, or raise server.max_body"
            raise RequestTooLarge(f"the body is larger than {most} bytes", hint=hint) from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise InvalidRequest("the body cannot be read", hint="check its encoding headers") from error
        except ConnectionError as error:
            raise CallerGone from error
        headers = {name.lower(): value for name, value in self._http.headers.items()}
        # a million characters parse in a few ms, but 200,000 token ids in 60
        large = len(raw) > INLINE_BYTES
        ask = self._ask = await asyncio.to_thread(self._parsed, raw, headers) if large else self._parsed(raw, headers)
        self._head = Head(self._head.id, self._head.created, ask.model)
        self._chunks = Chunks(self._dialect, self._head, include_usage=ask.include_usage) if ask.stream else None
        self._answers = [Answer() for _ in range(len(ask.inputs) * ask.sampling.choices)]
        self._progress_at = self._gateway.clock() + PROGRESS_EVERY_S
        return ask

    def _parsed(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        return self._parse(decode(raw), headers)

    def limited(self, standing: Standing) -> None:
        """Remember what is left, for the headers."""
        self._limits = rate_limit_headers(standing)

    def explain(self, index: int, explanation: Explanation) -> None:  # noqa: ARG002 - headers tell of one prompt
        """Remember why it goes there, for the headers."""
        self._explanation = explanation

    async def place(self, index: int, placement: Placement) -> None:
        """Remember where it goes, for the headers."""
        self._placement = placement
        choices = placement.request.sampling.choices
        self._answers[index * choices : (index + 1) * choices] = [Answer() for _ in range(choices)]

    async def write(self, index: int, delta: Delta) -> None:
        """Stream one piece, or collect it."""
        assert self._ask is not None
        if delta.computed_tokens is not None:
            await self._write_progress(delta.computed_tokens, delta.expected_s)
            return
        if delta.usage is not None:
            self._usages[index] = delta.usage
        choice = index * self._ask.sampling.choices + delta.choice
        if self._chunks is None:
            self._answers[choice].add(delta)
        elif event := self._chunks.render(choice, delta):
            self._seen.add(index)
            await self._send(event)

    def has_seen(self, index: int) -> bool:
        """Was a piece of it streamed?"""
        return index in self._seen

    async def finish(self) -> web.StreamResponse:
        """End the answer; what aiohttp is to return."""
        usage = usage_sum(self._usages.values())
        if self._chunks is None:
            body = whole_body(self._dialect, self._head, self._answers, usage)
            return web.Response(body=body, content_type="application/json", headers=self._headers())
        await self._send(self._chunks.end(usage))
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def fail(self, error: ExpectedError) -> web.StreamResponse:
        """Tell the client of `error`: as a status if none was sent yet, else as the last event of the stream."""
        if self._response is None:
            return error_response(error, headers={"X-Request-Id": self.id, **self._limits, **self._why()})
        await self._send(b"data: " + msgspec.json.encode(openai_error(error)) + b"\n\n")
        await self._response.write_eof()
        return self._response

    async def _write_progress(self, computed_tokens: int, expected_s: float | None) -> None:
        now = self._gateway.clock()
        if self._chunks is None or self._placement is None or self._seen or now < self._progress_at:
            return
        self._progress_at = now + PROGRESS_EVERY_S
        soon = "" if expected_s is None else f", first token in about {expected_s:.1f} s"
        await self._send(f": prefill {computed_tokens}/{self._placement.request.prompt_tokens}{soon}\n\n".encode())

    async def _send(self, data: bytes) -> None:
        try:
            if self._response is None:
                self._response = web.StreamResponse(headers={**_SSE, **self._headers()})
                await self._response.prepare(self._http)
            # waits while the client reads slower than the backend writes
            await self._response.write(data)
        except ConnectionError as error:
            raise CallerGone from error

    def _headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": self.id, **self._limits, **self._why()}
        if (where := self._placement) is not None:
            headers["X-Pointsman-Backend"] = where.backend
            headers["X-Pointsman-Class"] = where.request.service_class
            headers["X-Pointsman-Tenant"] = where.request.tenant
        return headers

    def _why(self) -> dict[str, str]:
        return {} if self._explanation is None else {"X-Pointsman-Decision": as_header(self._explanation)}


def error_response(
    error: ExpectedError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """`error` in OpenAI's shape; `status` where HTTP itself says which."""
    all_headers = dict(headers or {})
    if (after := retry_after(error)) is not None:
        all_headers["Retry-After"] = after
    body = msgspec.json.encode(openai_error(error))
    return web.Response(
        body=body, status=status or status_of(error).http, content_type="application/json", headers=all_headers
    )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves in OpenAI's shape, those of HTTP itself too."""
    try:
        with outer_edge(request.app[_GATEWAY].telemetry):
            try:
                return await handler(request)
            except web.HTTPException as refusal:
                allowed = {"Allow": refusal.headers["Allow"]} if "Allow" in refusal.headers else {}
                what = InvalidRequest(f"{refusal.reason}: {request.method} {request.path[:200]}", hint=_ROUTES_HINT)
                return error_response(what, status=refusal.status, headers=allowed)
    except ExpectedError as error:
        return error_response(error)
    except CallerGone:
        # nobody reads this; aiohttp wants a response all the same
        return web.Response(status=499)


async def _answer(http: web.Request, dialect: Dialect, parse: Parse) -> web.StreamResponse:
    gateway = http.app[_GATEWAY]
    caller = HttpCaller(http, gateway, dialect=dialect, parse=parse)
    try:
        await serve(caller, gateway)
        return await caller.finish()
    except ExpectedError as error:
        return await caller.fail(error)


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _answer(request, ChatDialect(), chat_ask)


async def _complete(request: web.Request) -> web.StreamResponse:
    return await _answer(request, CompletionDialect(), completion_ask)


async def _models(request: web.Request) -> web.Response:
    entries = [_model_entry(model) for model in _allowed_models(request).values()]
    return _json({"object": "list", "data": entries})


async def _model(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    model = _allowed_models(request).get(name)
    if model is None:
        hint = "GET /v1/models lists the models"
        raise UnknownModel(f"there is no model '{name[:80]}'", hint=hint, param="model")
    return _json(_model_entry(model))


def _allowed_models(request: web.Request) -> dict[str, ServedModel]:
    gateway = request.app[_GATEWAY]
    return gateway.models_for(identify(key_in(request.headers), gateway.config))


def _model_entry(model: ServedModel) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": model.name, "object": "model", "created": 0, "owned_by": "pointsman"}
    return entry | {"max_model_len": model.context_tokens, "backends": model.backends}


async def _healthz(_: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _readyz(request: web.Request) -> web.Response:
    gateway = request.app[_GATEWAY]
    ready = gateway.is_ready()
    pools = gateway.cluster.pools_ready().items()
    states = {name: "ready" if well else "no healthy backend" for name, well in pools}
    return _json({"ready": ready, "open": gateway.doors.open, "pools": states}, status=200 if ready else 503)


async def _metrics(request: web.Request) -> web.Response:
    telemetry, accept = request.app[_GATEWAY].telemetry, request.headers.get("Accept", "")
    body, content_type = await asyncio.to_thread(telemetry.exposition, accept)
    return web.Response(body=body, headers={"Content-Type": content_type})


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
