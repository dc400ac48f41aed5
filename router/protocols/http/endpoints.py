"""The HTTP endpoints: paths of OpenAI and Anthropic, health, readiness and metrics."""

from __future__ import annotations

import asyncio
import logging
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from backends.messages.answer import MESSAGES_PATH
from http1.errors import ClientGone, HttpError
from http1.message import header_lines
from http1.request import Handler, Reply, Request, Response, Stream
from policies.errors import ExpectedError, InvalidRequest, NoCredential, Unauthenticated, UnknownModel
from policies.explain import Explanation
from policies.nouns import Delta, Tenant, Usage
from policies.quota.budget import Standing
from policies.sla.server import OPEN
from router.ask import Ask
from router.call.bodies import SMALL_BYTES, Held
from router.call.caller import CallerGone, Placement
from router.call.disclosure import shown_name
from router.call.edges import unplanned
from router.call.gateway import Gateway
from router.call.identify import key_in
from router.call.operators import operator_of
from router.call.pipeline import serve
from router.call.tracing import w3c_headers
from router.fleet.cluster.served_model import ServedModel
from router.protocols.aliases import aliased, changed, changed_bytes
from router.protocols.anthropic.answers import anthropic_failure
from router.protocols.anthropic.request import COUNT_PATH, counted_messages
from router.protocols.counting import count_tokens
from router.protocols.dialect import (
    Answer,
    Dialect,
    Failure,
    Head,
    comment,
    decode,
    decode_whole,
    rate_limit_headers,
    usage_sum,
)
from router.protocols.dialect import Stream as EventStream
from router.protocols.dialects import DIALECTS
from router.protocols.explanations import DOCUMENTS_HEADER, as_header, documents_header
from router.protocols.http.body import read_body
from router.protocols.http.cors import allow_origin, is_preflight, preflight
from router.protocols.http.document_sets import SETS_PATH, add_document_sets
from router.protocols.http.models import MODELS_PATH, anthropic_entry, model_entry, model_list
from router.protocols.http.prefixes import PREFIXES_PATH, add_prefixes
from router.protocols.http.routes import Routes
from router.protocols.http.silences import Silences
from router.protocols.http.tokenizing import DETOKENIZE_PATH, TOKENIZE_PATH, add_tokenizing
from router.protocols.http.worker import WELL, add_worker
from router.protocols.openai.dialect import openai_failure
from router.protocols.openai.fields import MOST_ID_CHARACTERS
from router.protocols.status import challenge, retry_after
from router.protocols.strangers import REST_S, Strangers, address_of

T = TypeVar("T")

PROGRESS_EVERY_S = 1.0
"""Time between two progress comments (SSE) to a client during prefill; they keep proxies from timing out."""

WAIT_S, QUEUED_S = 15.0, 45.0
"""A stream is silent for so long at a backend, or before one is chosen. From its first sign of life on it has a head,
and a refusal can only be its last event; proxies wait for 60 s (nginx, AWS's load balancers)."""

Metrics = Callable[[str], tuple[bytes, str]]
"""(the `Accept` header) -> all metrics, and their content type."""

_SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_JSON = {"Content-Type": "application/json"}
_SSE_LINES, _JSON_LINES = header_lines(_SSE.items()), header_lines(_JSON.items())

_ROUTES_HINT = (
    f"this router answers POST {', '.join(DIALECTS)}, {COUNT_PATH}, {TOKENIZE_PATH}, {DETOKENIZE_PATH}, "
    f"{PREFIXES_PATH}, PUT {SETS_PATH}/NAME, and GET /v1/models, /healthz and /readyz"
)

_HEALTH = frozenset({"/healthz", "/readyz", *WELL})
"""Paths that load balancers ask all the time, from few addresses."""

_log = logging.getLogger("pointsman.http")


class HttpEndpoints:
    """Answers the requests to one router: `answer` is the handler of an HttpServer, `refuse` renders the reply to bytes
    that are not a valid request.
    """

    def __init__(self, gateway: Gateway, metrics: Metrics, strangers: Strangers) -> None:
        self._gateway, self._metrics, self._strangers = gateway, metrics, strangers
        self._silences = Silences()
        self.routes = routes = Routes()
        for path in DIALECTS:
            # `answer` looks for these first
            routes.add("POST", path, self.answer)
        routes.add("POST", COUNT_PATH, self._count_tokens)
        routes.add("GET", MODELS_PATH, self._models)
        routes.add("GET", f"{MODELS_PATH}/{{name:path}}", self._model)
        add_prefixes(routes, gateway.prefixes, gateway.bodies, self._tenant, self._read)
        add_document_sets(routes, gateway.document_sets, gateway.bodies, self._find_model, self._tenant, self._read)
        add_tokenizing(routes, gateway, self._tenant, self._read)
        routes.add("GET", "/healthz", self._healthz)
        routes.add("GET", "/readyz", self._readyz)
        routes.add("GET", "/metrics", self._show_metrics)
        add_worker(routes, gateway.is_ready, gateway.cluster, self._tenant)

    def __repr__(self) -> str:
        return f"<HttpEndpoints {self.routes!r}>"

    async def answer(self, request: Request) -> Reply:
        """Answer `request`. Errors have the shape of its path's API, or else OpenAI's. Raises ClientGone.

        An address that sends too many requests without a known key is answered 429.
        """
        gateway, path = self._gateway, request.path
        server = gateway.config.server
        most = None if path in _HEALTH else server.stranger_requests
        if most is not None and self._strangers.levels:
            address = self._address(request)
            if self._strangers.is_over(address, most) and not self._is_known(request):
                return self._turned_away(request, address)
        if not gateway.doors.open:
            # the router shuts down: a new connection takes the client to another router
            request.hang_up = True
        origins = server.cors_origins
        try:
            if origins:
                allow_origin(request, origins)
                if is_preflight(request):
                    return preflight(request, origins)
            if request.method == "POST" and (dialect := DIALECTS.get(path)) is not None:
                caller = HttpCaller(request, gateway, dialect, self._silences)
                try:
                    address = self._address(request) if server.trusted_proxies else request.address
                    await serve(caller, gateway, address=address)
                    return await caller.finish()
                except ExpectedError as error:
                    return await caller.fail(error)
                finally:
                    self._silences.discard(caller)
            by_method = self.routes.at(path)
            method = "GET" if request.method == "HEAD" else request.method
            handler = None if by_method is None else by_method.get(method)
            return self._misdirected(request, by_method) if handler is None else await handler(request)
        except ExpectedError as error:
            return failure_response(_shape(request)(error), error, headers={})
        except CallerGone as error:
            raise ClientGone("the client has gone") from error
        except Exception as error:  # noqa: BLE001 - the outer edge
            mistake = unplanned(error, gateway.observer)
            return failure_response(_shape(request)(mistake), mistake, headers={})
        finally:
            if most is not None and not request.is_known:
                self._strangers.count(self._address(request), most)

    def refuse(self, error: HttpError) -> Response:
        """The reply to bytes that are not a valid request."""
        # one line, without the bytes: a public port gets many of them, and they may hold a key
        _log.info("a client sent invalid HTTP: %s", error.reason)
        what = InvalidRequest(error.reason, hint="the router reads HTTP/1.1 (RFC 9112)")
        return failure_response(openai_failure(what, error.status), what, headers={})

    def _is_known(self, request: Request) -> bool:
        gateway = self._gateway
        try:
            gateway.identities.of(key_in(request.headers), gateway.config)
        except ExpectedError:
            return False
        return True

    def _turned_away(self, request: Request, address: str) -> Response:
        request.rest_s = REST_S
        what = self._strangers.refusal(address)
        return failure_response(_shape(request)(what), what, headers={})

    def _misdirected(self, request: Request, by_method: Mapping[str, Handler] | None) -> Response:
        """The reply to an unknown path or a wrong method, with the nearest path or the allowed methods."""
        path, method = request.path[:200], request.method[:20]
        headers, status = dict[str, str](), 404
        if by_method is not None:
            methods = sorted({*by_method, *(("HEAD",) if "GET" in by_method else ())})
            headers, status = {"Allow": ", ".join(methods)}, 405
            what = InvalidRequest(f"{path} does not accept {method}", hint=f"it accepts {' or '.join(methods)}")
        else:
            meant = self.routes.nearest(path)
            hint = _ROUTES_HINT if meant is None else f"did you mean '{meant}'?"
            what = InvalidRequest(f"there is no {path} here", hint=hint)
        return failure_response(_shape(request)(what, status), what, headers=headers)

    async def _count_tokens(self, request: Request) -> Response:
        tenant, gateway = await self._tenant(request), self._gateway
        with Held(gateway.bodies, tenant.name) as held:
            only = gateway.models.only(tenant.name, gateway.config)
            usual = {} if only is None else {"model": only}
            ask = await self._read(request, held, lambda body: counted_messages(usual | body, request.headers.lowered))
            return json_response(
                {"input_tokens": await count_tokens(ask, tenant, gateway.config, gateway.models, gateway.prompts)}
            )

    async def _tenant(self, request: Request) -> Tenant:
        gateway = self._gateway
        identity = await gateway.identities.identified(key_in(request.headers), gateway.config, self._address(request))
        request.is_known = True
        return identity.tenant

    def _address(self, request: Request) -> str:
        """The client's address, also behind trusted proxies."""
        proxies = self._gateway.config.server.trusted_proxies
        return address_of(request, proxies) if proxies else request.address

    async def _read(self, http: Request, held: Held, parse: Callable[[dict[str, Any]], T]) -> T:
        raw = await read_body(http, self._gateway.config.server.max_body_bytes, held)
        aliases = self._gateway.config.aliases

        def parsed(raw: bytes) -> T:
            body = decode(raw)
            return parse(changed(body, changes) if (changes := aliased(body, http.path, aliases)) else body)

        return await held.parse(raw, parsed)

    async def _models(self, request: Request) -> Response:
        models = (await self._allowed_models(request)).values()
        return json_response(model_list(models, is_anthropic=_speaks_anthropic(request)))

    async def _model(self, request: Request, name: str) -> Response:
        model = (await self._allowed_models(request)).get(name)
        if model is None:
            hint = "GET /v1/models lists the models"
            raise UnknownModel(f"there is no model '{name[:80]}'", hint=hint, param="model")
        return json_response(anthropic_entry(model) if _speaks_anthropic(request) else model_entry(model))

    def _find_model(self, name: str, tenant: Tenant) -> ServedModel:
        return self._gateway.models.find(name, tenant, self._gateway.config)

    async def _allowed_models(self, request: Request) -> dict[str, ServedModel]:
        return self._gateway.models.of(await self._tenant(request), self._gateway.config)

    async def _healthz(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def _readyz(self, _: Request) -> Response:
        gateway = self._gateway
        ready = gateway.is_ready()
        pools = gateway.cluster.pools_ready().items()
        states = {name: "ready" if well else "no healthy backend" for name, well in pools}
        report = {"ready": ready, "open": gateway.doors.open, "pools": states}
        if gateway.replicas is not None:
            # no condition of readiness: an approximate state only makes placement a little worse
            report["replicas"] = gateway.replicas.state
        return json_response(report, status=200 if ready else 503)

    async def _require_viewer(self, request: Request) -> None:
        """Raise Unauthenticated or PermissionDenied unless an operator of any role sent `request`."""
        try:
            await operator_of(key_in(request.headers), self._gateway.config, self._gateway.identities)
        except Unauthenticated as error:
            if not isinstance(error, NoCredential):
                self._gateway.observer.refused(self._address(request), error)
            hint = "they name tenants and backends: send an admin key, or ask at server.admin or server.metrics"
            kind = NoCredential if isinstance(error, NoCredential) else Unauthenticated
            raise kind("metrics need an admin key here", hint=hint) from error

    async def _show_metrics(self, request: Request) -> Response:
        if self._gateway.config.server.metrics != OPEN:
            await self._require_viewer(request)
        request.is_known = True
        self._gateway.later.flush()
        # in a thread: 55 ms for 600 series
        body, content_type = await asyncio.to_thread(self._metrics, request.headers.get("accept", ""))
        return Response(200, body, {"Content-Type": content_type})


class HttpCaller:
    """One POST of a client, as the pipeline sees it; streamed or collected."""

    _head: Head | None = None
    _ask: Ask | None = None
    _events: EventStream | None = None
    _passes_on = False
    """Is it a stream that may consist of the bytes of the backend's events?"""
    _placement: Placement | None = None
    _limits: Mapping[str, str] = MappingProxyType({})
    _response: Stream | None = None
    _told_at = 0.0
    """When its client last got a sign of life, and before the first when it was read."""
    _sent, _looked_at = 0, (b"", 0)
    """The events that were rendered, and at the last look: the newest piece that was passed on, and `_sent`."""
    _ending: bytes | None = None
    _raw = _body = b""
    _tenant = ""

    def __init__(self, http: Request, gateway: Gateway, dialect: Dialect, silences: Silences) -> None:
        headers = http.headers.lowered
        self.id, self.key = next(gateway.ids), key_in(headers)
        self.trace = w3c_headers(headers) if "traceparent" in headers or "tracestate" in headers else {}
        self._http, self._gateway, self._dialect, self._silences = http, gateway, dialect, silences
        self._created_s = int(gateway.unix_time())
        # of every answer, errors too; Anthropic's clients read the second
        self._headers = {"X-Request-Id": self.id, "Request-Id": self.id}
        if (given := headers.get("x-request-id")) is not None and _is_an_id(given):
            self._headers |= {"X-Request-Id": given, "X-Pointsman-Request": self.id}
        self._answers: list[Answer] = []
        self._usages: dict[int, Usage] = {}
        self._seen: set[int] = set()

    def __repr__(self) -> str:
        return f"<HttpCaller {self.id} {'streaming' if self._response else 'silent'}, {len(self._seen)} prompts seen>"

    async def read(self, held: Held) -> Ask:
        """The body, parsed."""
        # a call is identified before it is read
        http, most_bytes = self._http, self._gateway.config.server.max_body_bytes
        http.is_known = True
        raw = None
        if "content-encoding" not in http.headers.lowered:
            # as nearly every body
            raw = http.arrived(min(SMALL_BYTES, most_bytes))
        if raw is None:
            raw = await read_body(http, most_bytes, held)
        self._tenant = held.tenant
        ask = self._ask = await held.parse(raw.removeprefix(BOM_UTF8), self._parsed)
        self._head = Head(self._dialect.prefix + self.id, self._created_s, ask.model)
        if ask.stream:
            self._events, self._passes_on = self._dialect.stream(self._head, ask), len(ask.inputs) == 1
            self._told_at = self._gateway.clock()
            self._silences.add(self)
        else:
            choices = len(ask.inputs) * ask.sampling.choices
            self._answers = [Answer()] if choices == 1 else [Answer() for _ in range(choices)]
        return ask

    def _parsed(self, raw: bytes) -> Ask:
        (body, raw), config = decode_whole(raw), self._gateway.config
        aliases = config.aliases
        if not body.get("model") and (name := self._gateway.models.only(self._tenant, config)) is not None:
            named = {"model": name}
            body, raw = {**body, **named}, changed_bytes(raw, named)
        if aliases and (changes := aliased(body, self._http.path, aliases)):
            body, raw = changed(body, changes), changed_bytes(raw, changes)
        ask = self._dialect.parse(body, self._http.headers.lowered)
        # the raw bytes are sent on only if the parsed body is all of them
        is_whole = len(ask.natives) == 1 and ask.natives[0].body is body
        return replace(ask, natives=(replace(ask.natives[0], raw=raw),)) if is_whole else ask

    def limited(self, standing: Standing) -> None:
        """Tell what is left of the limits in the headers."""
        self._limits = rate_limit_headers(standing)

    def explain(self, index: int, explanation: Explanation) -> None:  # noqa: ARG002 - headers are about one prompt
        """Tell why it goes there in the headers."""
        self._headers["X-Pointsman-Decision"] = as_header(explanation)

    def place(self, index: int, placement: Placement) -> None:
        """Keep the placement for the headers."""
        if placement.beginning is not None:
            assert self._events is not None, "only streams are continued"
            self._events.resume(self._raw, len(placement.beginning.text))
            self._raw = b""
            return
        if self._events is not None:
            self._events.begin(placement.request.prompt_tokens)
        elif self._placement is not None:
            # perhaps another backend was tried before
            choices, self._body = placement.request.sampling.choices, b""
            self._answers[index * choices : (index + 1) * choices] = [Answer() for _ in range(choices)]
        self._placement = placement

    def write(self, index: int, delta: Delta) -> Coroutine[Any, Any, None] | None:
        """Stream one piece, or collect it."""
        if (raw := delta.raw) is not None and self._passes_on and delta.usage is None:
            # nearly every event of a stream
            self._raw = raw
            self._seen.add(index)
            try:
                response = self._response or self._begun()
                return None if response.push(raw) else self._drained(response)
            except ClientGone as error:
                raise CallerGone from error
        assert self._ask is not None
        if delta.computed_tokens is not None:
            return self._write_progress(delta.computed_tokens, delta.expected_s)
        if delta.usage is not None:
            self._usages[index] = delta.usage
        if self._events is None:
            if delta.body is not None and self._dialect.passes_on and len(self._ask.inputs) == 1:
                self._body = delta.body
            else:
                self._answers[index * self._ask.sampling.choices + delta.choice].add(delta)
            return None
        if raw is not None and self._passes_on:
            # what ends the stream waits until the call is settled
            self._ending = raw
            return None
        event = self._rendered(index, delta)
        if not event:
            return None
        self._seen.add(index)
        return self._send(event)

    def has_seen(self, index: int) -> bool:
        """Whether a piece of the answer to prompt `index` was sent."""
        return index in self._seen

    async def finish(self) -> Reply:
        """End the answer and return it, for the server. Raises CallerGone."""
        assert self._ask is not None
        assert self._head is not None
        usages = [*self._usages.values()]
        usage = usages[0] if len(usages) == 1 else usage_sum(usages)
        if self._events is None:
            body = self._body or self._dialect.whole(self._head, self._ask, self._answers, usage)
            return Response(200, body, self._lines(_JSON_LINES))
        return await self._end(self._events.end(usage) if self._ending is None else self._ending)

    async def fail(self, error: ExpectedError) -> Reply:
        """Report `error` to the client: by the status if none was sent yet, else in the last event of the stream."""
        if self._response is None or self._events is None:
            return failure_response(self._dialect.failure(error), error, headers={**self._headers, **self._limits})
        return await self._end(self._events.fail(error))

    def _rendered(self, index: int, delta: Delta) -> bytes:
        """The events for one piece that is not passed on as it came."""
        assert self._events is not None
        assert self._ask is not None
        first, raw = index * self._ask.sampling.choices, delta.raw
        return self._events.render(first + delta.choice, delta) if raw is None else self._events.merge(first, raw)

    def _write_progress(self, computed_tokens: int, expected_s: float | None) -> Coroutine[Any, Any, None] | None:
        now = self._gateway.clock()
        is_due = now - self._told_at >= PROGRESS_EVERY_S
        if self._events is None or self._placement is None or self._seen or not is_due:
            return None
        soon = "" if expected_s is None else f", first token in about {expected_s:.1f} s"
        done = f"prefill {computed_tokens}/{self._placement.request.prompt_tokens}{soon}"
        return self._tell(done, self._events, now)

    def tell_wait(self) -> None:
        """Have the client of a stream know that it waits, if nothing has come for long."""
        events, now = self._events, self._gateway.clock()
        if events is None or (self._response is not None and self._response.is_ended):
            return
        before, self._looked_at = self._looked_at, (self._raw, self._sent)
        if before[0] is not self._raw or before[1] != self._sent:
            self._told_at = now
        if now - self._told_at < (QUEUED_S if self._placement is None else WAIT_S):
            return
        # a client that has gone is found by its connection
        with suppress(CallerGone):
            if not self._seen:
                unread = self._tell("no token yet", events, now)
            else:
                self._told_at = now
                # among a backend's own events no other can be
                waits = "no token now"
                unread = self._send(comment(waits) if self._raw else events.progress(waits))
            if unread is not None:
                # it has more to read than this
                unread.close()

    def _tell(self, what: str, events: EventStream, now: float) -> Coroutine[Any, Any, None] | None:
        self._told_at = now
        told = events.progress(what)
        # the backend that answers may speak the dialect, and have a beginning of its own
        self._passes_on = self._passes_on and not events.has_begun
        return self._send(told)

    def _send(self, data: bytes) -> Coroutine[Any, Any, None] | None:
        """Send `data`; waits where the client reads slower than the backend writes."""
        response = self._response or self._begun()
        self._sent += 1
        try:
            return None if response.push(data) else self._drained(response)
        except ClientGone as error:
            raise CallerGone from error

    async def _drained(self, response: Stream) -> None:
        try:
            await response.drained()
        except ClientGone as error:
            raise CallerGone from error

    async def _end(self, data: bytes) -> Stream:
        response = self._begun()
        try:
            await response.end(data)
        except ClientGone as error:
            raise CallerGone from error
        return response

    def _begun(self) -> Stream:
        if self._response is None:
            self._response = self._http.start(200, self._lines(_SSE_LINES))
        return self._response

    def _lines(self, first: bytes) -> bytes:
        """The header lines of a successful answer: `first`, and its backend, class and tenant."""
        where, rest = self._placement, header_lines({**self._headers, **self._limits}.items())
        if where is None:
            return first + rest
        request = where.request
        lines = first + rest + _placement_lines(where.backend, request.service_class, request.tenant)
        if request.documents:
            lines += header_lines([(DOCUMENTS_HEADER, documents_header(request.documents))])
        return lines


@lru_cache(maxsize=1024)
def _placement_lines(backend: str, service_class: str, tenant: str) -> bytes:
    """The header lines that name where an answer comes from; the same for many requests."""
    names = {"Backend": shown_name(backend), "Class": service_class, "Tenant": tenant}
    return header_lines([(f"X-Pointsman-{what}", name) for what, name in names.items()])


def _is_an_id(given: str) -> bool:
    """Whether a client's own id of its request may stand in a header."""
    return 0 < len(given) <= MOST_ID_CHARACTERS and given.isascii() and given.isprintable()


def failure_response(failure: Failure, error: ExpectedError, *, headers: Mapping[str, str]) -> Response:
    """`failure` as a reply, with `Retry-After` if `error` has a time, and what a 401 asks for."""
    all_headers = {**_JSON, **headers}
    if (after := retry_after(error)) is not None:
        all_headers["Retry-After"] = after
    if (asked := challenge(error)) is not None:
        all_headers["WWW-Authenticate"] = asked
    return Response(failure.status, failure.body, all_headers)


def json_response(body: Any, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(status, msgspec.json.encode(body), _JSON)


def _shape(request: Request) -> Callable[..., Failure]:
    return anthropic_failure if _speaks_anthropic(request) else openai_failure


def _speaks_anthropic(request: Request) -> bool:
    """Whether errors and lists go out in Anthropic's shape: at its paths, or by header at paths of no dialect."""
    path = request.path
    is_ours = path.startswith((PREFIXES_PATH, *DIALECTS))
    return path.startswith(MESSAGES_PATH) or ("anthropic-version" in request.headers and not is_ours)
