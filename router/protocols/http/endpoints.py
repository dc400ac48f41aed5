"""The HTTP side: routes of OpenAI and Anthropic, health, readiness and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec.structs import replace

from backends.messages.answer import MESSAGES_PATH
from policies.errors import ExpectedError, InvalidRequest, UnknownModel
from policies.explain import Explanation
from policies.nouns import Delta, Tenant, Usage
from policies.quota.budget import Standing
from policies.suggest import did_you_mean
from router.ask import Ask
from router.call.caller import CallerGone, Placement
from router.call.disclosure import shown_name
from router.call.gateway import Gateway
from router.call.identify import identify, key_in
from router.call.pipeline import outer_edge, serve
from router.call.tracing import w3c_headers
from router.fleet.cluster.served_model import ServedModel
from router.protocols.answer import Answer, Head, usage_sum
from router.protocols.anthropic.answers import anthropic_failure
from router.protocols.anthropic.request import COUNT_PATH, counted_messages
from router.protocols.counting import count_tokens
from router.protocols.dialect import Dialect, Failure, Stream
from router.protocols.dialects import DIALECTS
from router.protocols.explanations import as_header
from router.protocols.http.body import read_body
from router.protocols.http.cors import add_cors, answering_preflights
from router.protocols.http.models import MODELS_PATH, anthropic_entry, model_entry, model_list
from router.protocols.http.prefixes import PREFIXES_PATH, add_prefixes
from router.protocols.http.tokenizing import DETOKENIZE_PATH, TOKENIZE_PATH, add_tokenizing
from router.protocols.openai.dialect import openai_failure
from router.protocols.rate_limits import rate_limit_headers
from router.protocols.reading import decode
from router.protocols.status import retry_after

PROGRESS_EVERY_S = 1.0
"""A client whose prompt prefills hears of it so often, as SSE comments, which keeps proxies from giving up."""

INLINE_BYTES = 64 * 2**10
"""Larger bodies are parsed in a thread."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Metrics = Callable[[str], tuple[bytes, str]]
"""From what a client accepts to all metrics, and their content type."""

_GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
_METRICS: web.AppKey[Metrics] = web.AppKey("metrics")
_SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_ROUTES_HINT = (
    f"POST {', '.join(DIALECTS)}, {COUNT_PATH}, {TOKENIZE_PATH}, {DETOKENIZE_PATH}, {PREFIXES_PATH}, "
    "GET /v1/models, /healthz, /readyz or /metrics"
)


def http_app(gateway: Gateway, metrics: Metrics) -> web.Application:
    """The application that serves `gateway` and its `metrics`. Run it with `handler_cancellation=True`."""
    middlewares: list[Middleware] = [_errors, answering_preflights(lambda: gateway.config.server.cors_origins)]
    app = web.Application(middlewares=middlewares, client_max_size=gateway.config.server.max_body_bytes)
    app[_GATEWAY], app[_METRICS] = gateway, metrics
    for path, dialect in DIALECTS.items():
        app.router.add_post(path, _endpoint(dialect))
    app.router.add_post(COUNT_PATH, _count_tokens)
    app.router.add_get(MODELS_PATH, _models)
    app.router.add_get(f"{MODELS_PATH}/{{id:.+}}", _model)
    add_prefixes(app, gateway, _tenant, _body)
    add_tokenizing(app, gateway, _tenant, _body)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    app.on_response_prepare.append(_hang_up_where_closed)
    add_cors(app, lambda: gateway.config.server.cors_origins)
    return app


class HttpCaller:
    """One POST of a client, as the pipeline sees it; streamed or collected."""

    def __init__(self, http: web.Request, gateway: Gateway, dialect: Dialect) -> None:
        self.id, self.key, self.trace = gateway.new_id(), key_in(http.headers), w3c_headers(http.headers)
        self._http, self._gateway, self._dialect = http, gateway, dialect
        self._head = Head(dialect.prefix + self.id, gateway.unix_time_s(), "")
        self._ask: Ask | None = None
        self._stream: Stream | None = None
        self._answers: list[Answer] = []
        self._usages: dict[int, Usage] = {}
        self._placement: Placement | None = None
        self._explanation: Explanation | None = None
        self._limits: dict[str, str] = {}
        self._response: web.StreamResponse | None = None
        self._seen: set[int] = set()
        self._progress_at = 0.0
        self._ending: bytes | None = None

    def __repr__(self) -> str:
        return f"<HttpCaller {self.id} {'streaming' if self._response else 'silent'}, {len(self._seen)} prompts seen>"

    async def read(self) -> Ask:
        """The body, parsed."""
        raw = await read_body(self._http, self._gateway)
        headers = lowered(self._http)
        # a million characters parse in a few ms, but 200,000 token ids in 60
        large = len(raw) > INLINE_BYTES
        ask = self._ask = await asyncio.to_thread(self._parsed, raw, headers) if large else self._parsed(raw, headers)
        self._head = Head(self._head.id, self._head.created, ask.model)
        self._stream = self._dialect.stream(self._head, ask) if ask.stream else None
        self._answers = [Answer() for _ in range(len(ask.inputs) * ask.sampling.choices)]
        self._progress_at = self._gateway.clock() + PROGRESS_EVERY_S
        return ask

    def _parsed(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        body = decode(raw)
        ask = self._dialect.parse(body, headers)
        # what was taken apart is not what the client sent
        is_one = len(ask.natives) == 1 and ask.natives[0].body is body
        return replace(ask, natives=(replace(ask.natives[0], raw=raw),)) if is_one else ask

    def limited(self, standing: Standing) -> None:
        """Remember what is left, for the headers."""
        self._limits = rate_limit_headers(standing)

    def explain(self, index: int, explanation: Explanation) -> None:  # noqa: ARG002 - headers tell of one prompt
        """Remember why it goes there, for the headers."""
        self._explanation = explanation

    async def place(self, index: int, placement: Placement) -> None:
        """Remember where it goes, for the headers."""
        self._placement = placement
        if self._stream is not None:
            self._stream.begin(placement.request.prompt_tokens)
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
        if self._stream is None:
            self._answers[choice].add(delta)
        elif event := self._event(choice, delta):
            self._seen.add(index)
            await self._send(event)

    def has_seen(self, index: int) -> bool:
        """Was a piece of it streamed?"""
        return index in self._seen

    async def finish(self) -> web.StreamResponse:
        """End the answer; what aiohttp is to return."""
        usage = usage_sum(self._usages.values())
        if self._stream is None:
            body = self._dialect.whole(self._head, self._answers, usage)
            return web.Response(body=body, content_type="application/json", headers=self._headers())
        await self._send(self._stream.end(usage) if self._ending is None else self._ending)
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def fail(self, error: ExpectedError) -> web.StreamResponse:
        """Tell the client of `error`: as a status if none was sent yet, else as the last event of the stream."""
        if self._response is None or self._stream is None:
            headers = {**self._named(), **self._why()}
            return failure_response(self._dialect.failure(error), error, headers=headers)
        await self._send(self._stream.fail(error))
        await self._response.write_eof()
        return self._response

    def _event(self, choice: int, delta: Delta) -> bytes:
        """What the client is sent now for one piece; what ends the stream waits until the call is settled."""
        assert self._stream is not None
        assert self._ask is not None
        if delta.raw is None:
            return self._stream.render(choice, delta)
        if len(self._ask.inputs) > 1:
            return self._stream.merge(choice - delta.choice, delta.raw)
        if delta.usage is None:
            return delta.raw
        self._ending = delta.raw
        return b""

    async def _write_progress(self, computed_tokens: int, expected_s: float | None) -> None:
        now = self._gateway.clock()
        if self._stream is None or self._placement is None or self._seen or now < self._progress_at:
            return
        self._progress_at = now + PROGRESS_EVERY_S
        soon = "" if expected_s is None else f", first token in about {expected_s:.1f} s"
        done = f"prefill {computed_tokens}/{self._placement.request.prompt_tokens}{soon}"
        await self._send(self._stream.progress(done))

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
        headers = {**self._named(), **self._why()}
        if (where := self._placement) is not None:
            headers["X-Pointsman-Backend"] = shown_name(where.backend)
            headers["X-Pointsman-Class"] = where.request.service_class
            headers["X-Pointsman-Tenant"] = where.request.tenant
        return headers

    def _named(self) -> dict[str, str]:
        # the second is what Anthropic's clients look for
        return {"X-Request-Id": self.id, "Request-Id": self.id, **self._limits}

    def _why(self) -> dict[str, str]:
        return {} if self._explanation is None else {"X-Pointsman-Decision": as_header(self._explanation)}


def lowered(http: web.Request) -> dict[str, str]:
    """The headers of `http` by lower-case name."""
    return {name.lower(): value for name, value in http.headers.items()}


def failure_response(failure: Failure, error: ExpectedError, *, headers: Mapping[str, str]) -> web.Response:
    """`failure` as a reply, and when to come back, where `error` says so."""
    all_headers = dict(headers)
    if (after := retry_after(error)) is not None:
        all_headers["Retry-After"] = after
    return web.Response(body=failure.body, status=failure.status, content_type="application/json", headers=all_headers)


async def _hang_up_where_closed(request: web.Request, response: web.StreamResponse) -> None:
    """Have clients of a router that shuts down come back by another connection, to another router."""
    if not request.app[_GATEWAY].doors.open:
        response.headers["Connection"] = "close"
        response.force_close()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves in the shape of its path, those of HTTP itself too; OpenAI's where there is none."""
    shape = anthropic_failure if _speaks_anthropic(request) else openai_failure
    try:
        with outer_edge(request.app[_GATEWAY].observer):
            try:
                return await handler(request)
            except web.HTTPException as refusal:
                allowed = {"Allow": refusal.headers["Allow"]} if "Allow" in refusal.headers else {}
                what = _misdirected(request, refusal)
                return failure_response(shape(what, refusal.status), what, headers=allowed)
    except ExpectedError as error:
        return failure_response(shape(error), error, headers={})
    except CallerGone:
        # nobody reads this; aiohttp wants a response all the same
        return web.Response(status=499)


def _misdirected(request: web.Request, refusal: web.HTTPException) -> InvalidRequest:
    """What is there instead, for a path or a method that is not."""
    path, method = request.path[:200], request.method[:20]
    if isinstance(refusal, web.HTTPMethodNotAllowed):
        takes = " or ".join(sorted(refusal.allowed_methods))
        return InvalidRequest(f"{path} does not take {method}", hint=f"it takes {takes}")
    if not isinstance(refusal, web.HTTPNotFound):
        return InvalidRequest(f"{refusal.reason}: {method} {path}", hint=_ROUTES_HINT)
    known = (resource.canonical for resource in request.app.router.resources())
    meant = did_you_mean(path, (one for one in known if "{" not in one))
    return InvalidRequest(f"there is no {path} here", hint=meant or _ROUTES_HINT)


def _speaks_anthropic(request: web.Request) -> bool:
    """Is it a client of Anthropic's dialect? At paths that are not its own it says so in a header."""
    path = request.path
    is_ours = path.startswith((PREFIXES_PATH, *DIALECTS))
    return path.startswith(MESSAGES_PATH) or ("anthropic-version" in request.headers and not is_ours)


def _endpoint(dialect: Callable[[], Dialect]) -> Handler:
    """What answers the calls of one path."""

    async def answer(http: web.Request) -> web.StreamResponse:
        gateway = http.app[_GATEWAY]
        caller = HttpCaller(http, gateway, dialect())
        try:
            await serve(caller, gateway)
            return await caller.finish()
        except ExpectedError as error:
            return await caller.fail(error)

    return answer


async def _count_tokens(request: web.Request) -> web.Response:
    tenant = _tenant(request)
    ask = counted_messages(await _body(request), lowered(request))
    return _json({"input_tokens": await count_tokens(ask, tenant, request.app[_GATEWAY])})


def _tenant(request: web.Request) -> Tenant:
    gateway = request.app[_GATEWAY]
    return identify(key_in(request.headers), gateway.config, gateway.keys)


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await read_body(request, request.app[_GATEWAY])
    return await asyncio.to_thread(decode, raw) if len(raw) > INLINE_BYTES else decode(raw)


async def _models(request: web.Request) -> web.Response:
    models = _allowed_models(request).values()
    return _json(model_list(models, is_anthropic=_speaks_anthropic(request)))


async def _model(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    model = _allowed_models(request).get(name)
    if model is None:
        hint = "GET /v1/models lists the models"
        raise UnknownModel(f"there is no model '{name[:80]}'", hint=hint, param="model")
    return _json(anthropic_entry(model) if _speaks_anthropic(request) else model_entry(model))


def _allowed_models(request: web.Request) -> dict[str, ServedModel]:
    return request.app[_GATEWAY].models_for(_tenant(request))


async def _healthz(_: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _readyz(request: web.Request) -> web.Response:
    gateway = request.app[_GATEWAY]
    ready = gateway.is_ready()
    pools = gateway.cluster.pools_ready().items()
    states = {name: "ready" if well else "no healthy backend" for name, well in pools}
    told = {"ready": ready, "open": gateway.doors.open, "pools": states}
    if gateway.replicas is not None:
        # approximate is served all the same: it places a little worse
        told["replicas"] = gateway.replicas.state
    return _json(told, status=200 if ready else 503)


async def _metrics(request: web.Request) -> web.Response:
    # in a thread: 55 ms for 600 series
    body, content_type = await asyncio.to_thread(request.app[_METRICS], request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
