"""One request of a gateway in the pipeline: its Caller, and its Carrier to the backend."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from backends.base import Backend, Taker, give
from backends.http.backend import Forward, HttpBackend
from backends.http.client import MOST_ERROR_BYTES
from backends.http.exchange import encoded
from backends.http.json_members import maybe_twice
from policies.errors import BackendFailed, DeadlineExceeded, ExpectedError, InvalidRequest, Unreached
from policies.explain import Explanation
from policies.nouns import ACCEPTED, ClusterView, Delta, Prompt
from policies.quota.budget import Standing
from router.ask import Ask, Targets
from router.call.bid import Placed
from router.call.bodies import Held
from router.call.caller import Placement
from router.call.gateway import Gateway
from router.call.identify import key_in
from router.call.tracing import w3c_headers
from router.protocols.aliases import aliased, changed
from router.protocols.dialect import Dialect, decode_whole, rate_limit_headers
from router.protocols.dialects import DIALECTS, OTHER_PATHS
from router.protocols.explanations import DOCUMENTS_HEADER, as_header, documents_header
from router.protocols.http.models import model_entry
from router.protocols.openai.dialect import openai_failure
from router.protocols.picker.answers import reader_of
from router.protocols.picker.endpoints import Reach
from router.protocols.picker.messages import (
    FAIRNESS_IDS,
    MODEL_REWRITES,
    OBJECTIVES,
    TPOT_TARGETS,
    TTFT_TARGETS,
    Destination,
    immediate,
    picked,
)
from router.protocols.picker.phases import Head, Phases, ResponseHead, Say
from router.protocols.status import challenge, retry_after
from router.protocols.strangers import address_in

T = TypeVar("T")

MODELS_PATH = "/v1/models"

_OURS = ("authorization", "x-api-key", "accept-encoding")
"""Headers that are not passed on: keys of our tenants, and the one that would let the answer be compressed."""


class PickedCall:
    """Caller and Carrier of one request: the gateway sends it to the backend and passes the answer on."""

    continues = False

    def __init__(self, head: Head, phases: Phases, gateway: Gateway, say: Say, *, deadline_s: float | None) -> None:
        headers, self._say = head.headers, say
        self.id, self.key, self.trace = next(gateway.ids), key_in(headers), w3c_headers(headers)
        self._headers, self._phases, self._gateway, self._deadline_s = headers, phases, gateway, deadline_s
        path = headers.get(":path", "").partition("?")[0]
        # a gateway may have its routes below a path of its own
        known = next((known for known in DIALECTS if path.endswith(known)), path)
        self._path = OTHER_PATHS.get(known, known)
        self._dialect: Dialect | None = DIALECTS.get(self._path)
        self._reach = Reach(self._path, head.subset, gateway.cluster.backend)
        self._body: Mapping[str, Any] = {}
        self._took: str | None = None
        self._is_moving = self._is_changed = False
        self._whole, self._tenant = b"", ""

    def __repr__(self) -> str:
        return f"<PickedCall {self.id} {self._path}, offered {list(self._phases.names) or 'nothing'}>"

    async def read(self, held: Held) -> Ask:
        """The parsed body. Raises InvalidRequest, RequestTooLarge."""
        if self._dialect is None or self._headers.get(":method", "POST") != "POST":
            what = f"{self._headers.get(':method', 'POST')} {self._path[:200]}"
            raise InvalidRequest(f"no endpoint is picked for {what}", hint=f"POST {', '.join(DIALECTS)}")
        raw = await self._phases.body
        if self._headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequest("the body cannot be read: it is compressed", hint="send it without content-encoding")
        self._tenant = held.tenant
        ask, self._body = await held.parse(raw, self._parsed)
        # all prompts of a call go to the backend of its longest prompt
        longest = max(range(len(ask.inputs)), key=lambda at: _size(ask.inputs[at]))
        return replace(
            ask,
            inputs=(ask.inputs[longest],),
            bodies=(ask.bodies[longest],),
            natives=ask.natives[longest : longest + 1],
            priority=ask.priority or self._objective(),
            user=ask.user or self._said(FAIRNESS_IDS),
            targets=self._targets(),
            deadline_s=self._deadline_s if ask.deadline_s is None else ask.deadline_s,
        )

    def limited(self, standing: Standing) -> None:
        """Add headers with what is left of the limits."""
        self._phases.adds |= rate_limit_headers(standing)

    def explain(self, index: int, explanation: Explanation) -> None:  # noqa: ARG002 - it goes to one endpoint
        """Add a header with the explanation of the choice."""
        self._phases.adds["x-pointsman-decision"] = as_header(explanation)

    def place(self, index: int, placement: Placement) -> None:  # noqa: ARG002
        """Add headers with the placement."""
        self._phases.adds |= {
            "x-pointsman-class": placement.request.service_class,
            "x-pointsman-tenant": placement.request.tenant,
        }
        if placement.request.documents:
            self._phases.adds[DOCUMENTS_HEADER.lower()] = documents_header(placement.request.documents)

    def write(self, index: int, delta: Delta) -> None:
        """Do nothing: the gateway has passed it on already."""

    def has_seen(self, index: int) -> bool:  # noqa: ARG002
        """Whether the request was sent to the gateway. Then only the gateway itself can send it elsewhere."""
        return self._phases.is_sent and not self._is_moving

    @property
    def address(self) -> str:
        """The last address that the gateway has put into X-Forwarded-For; "" if there is none."""
        return address_in(self._headers.get("x-forwarded-for", "").rpartition(",")[2].strip()) or ""

    @property
    def way(self) -> Hashable:
        """The endpoints that it may use."""
        return (self._path, self._reach.subset, self._took)

    def seen(self, view: ClusterView) -> ClusterView:
        """`view` without backends that the gateway cannot reach; once it has chosen one, with that backend alone."""
        if self._took is None:
            return self._reach.seen(view)
        backends = (replace(each, unfit=None if each.name == self._took else "not_taken") for each in view.backends)
        return replace(view, backends=tuple(backends))

    async def carry(self, placed: Placed, backend: Backend, prompt: Prompt, to: Taker) -> None:
        """Send the gateway to `backend`, and parse the answer as it passes.

        Raises Unreached if it went to another one of the offered endpoints: the flight belongs to that one.
        """
        assert isinstance(backend, HttpBackend), f"{backend!r} has no endpoint"
        request = placed.bid.request
        forward = backend.forward(request, self._path)
        self._is_moving = False
        if not self._phases.is_sent:
            await self._send(placed, backend, forward, prompt)
        head = await self._soon(asyncio.shield(self._phases.response), backend, forward)
        self._heed(head, backend)
        if head.status != 200:
            error = forward.error_of(backend.name, head.status, await self._error(backend, forward), head.headers)
            backend.client.own_keys.hide_in(error)
            raise error
        if head.headers.get("content-encoding", "identity") != "identity":
            hint = "let the gateway compress after it has asked the picker"
            raise BackendFailed(f"the answer of {backend.name} is compressed and cannot be counted", hint=hint)
        await give((ACCEPTED,), to)
        is_streamed = head.headers.get("content-type", "").startswith("text/event-stream")
        reader = reader_of(self._path, backend.name, request, is_streamed=is_streamed)
        while not reader.is_over and (piece := await self._piece(backend, forward)) is not None:
            await give(reader.feed(piece), to)
        if not reader.is_over:
            await give(reader.end(), to)

    @property
    def asks_for_models(self) -> bool:
        """Whether the request lists models: then the router answers itself."""
        return self._headers.get(":method") == "GET" and self._path.endswith(MODELS_PATH)

    async def tell_models(self) -> None:
        """Answer with the models that the client may use. Raises Unauthenticated."""
        gateway, config = self._gateway, self._gateway.config
        identity = await gateway.identities.identified(self.key, config, self.address)
        models = gateway.models.of(identity.tenant, config).values()
        body = encoded({"object": "list", "data": [model_entry(model) for model in models]})
        await self._say(immediate(200, body, {}, details="models"))

    async def fail(self, error: ExpectedError) -> None:
        """Answer with `error` instead of an endpoint, unless an answer is on its way already: that continues."""
        if self._phases.response.done() and not isinstance(error, DeadlineExceeded):
            return
        failure = (self._dialect.failure if self._dialect is not None else openai_failure)(error)
        status = 404 if self._dialect is None and failure.status == 400 else failure.status
        headers = {"x-request-id": self.id, **self._phases.adds}
        if (after := retry_after(error)) is not None:
            headers["retry-after"] = after
        if (asked := challenge(error)) is not None:
            headers["www-authenticate"] = asked
        await self._say(immediate(status, failure.body, headers, details=error.code))

    def _parsed(self, raw: bytes) -> tuple[Ask, Mapping[str, Any]]:
        assert self._dialect is not None
        body, self._whole = decode_whole(raw)
        name = self._said(MODEL_REWRITES)
        if name is None and not body.get("model"):
            name = self._gateway.models.only(self._tenant, self._gateway.config)
        # the backend's name for it is among the fields that a backend always gets
        meant = body if name is None else {**body, "model": name}
        changes = aliased(meant, self._path, self._gateway.config.aliases)
        self._is_changed = bool(changes)
        return self._dialect.parse(changed(meant, changes) if changes else meant, self._headers), body

    def _objective(self) -> str | None:
        """The objective that the request names, if it is a class of ours; a cluster may have others of that name."""
        named = self._said(OBJECTIVES)
        return named if named in self._gateway.config.classes else None

    def _targets(self) -> Targets | None:
        """The caller's own targets; None if it names none."""
        found = Targets(*(_seconds(self._said(names)) for names in (TTFT_TARGETS, TPOT_TARGETS)))
        return None if found == Targets() else found

    def _said(self, names: Sequence[str]) -> str | None:
        """The value of the first header of `names` that came with one."""
        return next((value for name in names if (value := self._headers.get(name, "").strip())), None)

    async def _send(self, placed: Placed, backend: HttpBackend, forward: Forward, prompt: Prompt) -> None:
        phases, request = self._phases, placed.bid.request
        phases.names = self._reach.named(placed.found.decision, backend)
        came, raw, ended_by = phases.body.result(), self._whole, phases.ended_by
        assert ended_by is not None, "the body is whole"
        fields = dict(forward.fields)
        if (request.documents or self._is_changed) and prompt.native is not None:
            # documents go as text, in the router's order, and an alias changes what the client sent
            fields = _changes(self._body, prompt.native.body) | fields
        body = _rewritten(raw, self._body, fields)
        if body is None and raw != came:
            body = raw
        headers = {**forward.headers, **prompt.headers}
        if body is not None and not phases.modes.is_duplex:
            # the new length of a buffered body must be given
            headers["content-length"] = str(len(body))
        # set before sending: the gateway may answer before `say` returns
        phases.is_sent = True
        where = Destination(tuple(phases.names), headers, _OURS, body)
        for answer in picked(where, raw, phases.modes, ended_by=ended_by):
            await self._say(answer)

    def _heed(self, head: ResponseHead, backend: HttpBackend) -> None:
        """Raise Unreached if the gateway used another endpoint than that of `backend`, so that it counts there."""
        took = None if head.served is None else self._phases.names.get(head.served)
        if took is None or took == backend.name or self._took is not None:
            return
        self._took, self._is_moving = took, True
        raise Unreached(f"the gateway did not reach {backend.name} and went to {took}", hint=f"is {backend.url} up?")

    async def _error(self, backend: HttpBackend, forward: Forward) -> bytes:
        body = bytearray()
        while len(body) < MOST_ERROR_BYTES and (piece := await self._piece(backend, forward)) is not None:
            body += piece
        return bytes(body[:MOST_ERROR_BYTES])

    async def _piece(self, backend: HttpBackend, forward: Forward) -> bytes | None:
        return await self._soon(self._phases.pieces.get(), backend, forward)

    async def _soon(self, coming: Awaitable[T], backend: HttpBackend, forward: Forward) -> T:
        """The result of `coming`. Raises BackendFailed after a silence of `forward.idle_s`."""
        try:
            async with asyncio.timeout(forward.idle_s):
                return await coming
        except TimeoutError as error:
            hint = "options.idle_s limits its silence"
            raise BackendFailed(f"{backend.name} was silent for {forward.idle_s:g} s", hint=hint) from error


def _changes(body: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The members of `other` that `body` has not, or not so; None for those that it alone has."""
    return {name: other.get(name) for name in {*body, *other} if body.get(name) is not other.get(name)}


def _rewritten(raw: bytes, body: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes | None:
    """`raw` (parsed: `body`) with the backend's own `fields`; None if it stays unchanged."""
    changed = {name: value for name, value in fields.items() if body.get(name) != value}
    if not changed and not maybe_twice(raw, fields.keys() & body.keys()):
        return None
    sent = {name: value for name, value in {**body, **changed}.items() if name not in changed or value is not None}
    return encoded(sent)


def _seconds(milliseconds: str | None) -> float | None:
    """A target in seconds; None where it is no number above 0, as gateways have it."""
    try:
        seconds = float(milliseconds or "") / 1000
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


def _size(prompt: object) -> int:
    return len(prompt) if isinstance(prompt, str | bytes) else 0
