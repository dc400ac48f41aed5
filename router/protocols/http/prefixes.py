"""`/v1/prefixes`: compute the beginning of prompts and keep it, list what is kept, drop it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from http1.request import Request, Response
from policies.errors import InvalidRequest
from policies.nouns import Tenant
from policies.quantities import read_seconds, written_seconds
from policies.suggest import did_you_mean
from router.ask import Ask, Chat
from router.call.bodies import Bodies, Held
from router.call.disclosure import shown_name
from router.call.warming import as_warm_up
from router.protocols.dialect import converted
from router.protocols.http.body import ReadBody
from router.protocols.http.routes import Routes
from router.protocols.openai.fields import ChatBody, Common, CompletionBody
from router.protocols.openai.request import CHAT_PATH, COMPLETION_PATH, chat_ask, completion_ask
from router.shared.prefixes.prefix import Place, Prefix
from router.shared.prefixes.prefixes import Prefixes
from router.text.documents import written

PREFIXES_PATH = "/v1/prefixes"

USUAL_TTL_S = 600.0
MOST_TTL_S = 7 * 86400.0

Identify = Callable[[Request], Awaitable[Tenant]]

_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "x-api-key", "cookie"})
_OF_ANSWERS = (
    *("max_completion_tokens", "min_tokens", "n", "response_format"),
    *("echo", "logprobs", "suffix", "top_logprobs"),
)
"""Fields left out, because they would narrow the backends or ask for output that is not read."""

_OWN_FIELDS = ("shards", "ttl", "pin", "wait")
_ENGINES = frozenset(
    {
        *("add_special_tokens", "chat_template", "media_io_kwargs", "mm_processor_kwargs"),
        *("parallel_tool_calls", "reasoning_effort"),
    }
)
"""Fields of chats that the router does not read but that change the prompt in an engine."""
_HINTS = {
    "model": "GET /v1/models lists the models",
    "messages": "send `messages` as to /v1/chat/completions, or `prompt` as to /v1/completions",
    "shards": "the number of backends: from 1 to 64",
    "ttl": "how long to keep it: 30s, 10m, 2h, or a number of seconds",
    "pin": "true: only at backends that can pin; without it, pinned where possible",
}


class PrefixBody(msgspec.Struct, kw_only=True):
    """The fields of a body beside those of a chat or a text."""

    shards: Annotated[int, Meta(ge=1, le=64)] = 1
    ttl: str | float | int = USUAL_TTL_S
    pin: bool | None = None
    wait: bool = True


class Wish(NamedTuple):
    """A parsed request to keep a prefix. `waits`: the reply comes when it is computed."""

    ask: Ask
    shards: int
    ttl_s: float
    waits: bool


def wish_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> Wish:
    """The Wish in `body`. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, PrefixBody, hints=_HINTS, elsewhere="docs/prefixes.md lists the fields")
    if ("messages" in body) == ("prompt" in body):
        raise InvalidRequest("send either `messages` or `prompt`", hint=_HINTS["messages"], param="messages")
    _refuse_unknown(body, ChatBody if "messages" in body else CompletionBody)
    plain = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    plain |= {"max_tokens": 1, "stream": False}
    for name in _OF_ANSWERS:
        plain.pop(name, None)
    # the wish is stored as long as the prefix; keys must not be
    kept = {name: value for name, value in headers.items() if name not in _SECRET_HEADERS}
    ask = _chat(plain, kept) if "messages" in plain else _text(plain, kept)
    return Wish(
        as_warm_up(ask, ask.bodies[0], must_pin=bool(fields.pin)), fields.shards, ttl_seconds(fields.ttl), fields.wait
    )


def add_prefixes(routes: Routes, prefixes: Prefixes, bodies: Bodies, identify: Identify, read: ReadBody) -> None:
    """Add the calls to `routes`; `identify` finds the tenant, `read` parses the body."""

    async def create(http: Request) -> Response:
        tenant = await identify(http)
        with Held(bodies, tenant.name) as held:
            ask, shards, ttl_s, waits = await read(http, held, lambda body: wish_of(body, http.headers.lowered))
            prefix = await prefixes.keep(ask, tenant, shards=shards, ttl_s=ttl_s, waits=waits)
        return _reply(shown(prefix), status=202 if prefix.is_warming else 200)

    async def show_all(http: Request) -> Response:
        tenant = await identify(http)
        await prefixes.caught_up()
        found = prefixes.of(tenant.name)
        return _reply({"object": "list", "data": [shown(prefix) for prefix in found]})

    async def show(http: Request, id: str) -> Response:  # noqa: A002 - it is the prefix's id
        tenant = await identify(http)
        await prefixes.caught_up()
        return _reply(shown(prefixes.get(tenant.name, id)))

    async def delete(http: Request, id: str) -> Response:  # noqa: A002
        prefix = await prefixes.drop((await identify(http)).name, id)
        return _reply({"id": prefix.id, "object": "prefix", "deleted": True})

    routes.add("POST", PREFIXES_PATH, create)
    routes.add("GET", PREFIXES_PATH, show_all)
    routes.add("GET", f"{PREFIXES_PATH}/{{id}}", show)
    routes.add("DELETE", f"{PREFIXES_PATH}/{{id}}", delete)


def shown(prefix: Prefix, named: Callable[[str], str] = shown_name) -> dict[str, Any]:
    """`prefix` as clients see it; `named` gives the shown name of a backend. Times are Unix times in whole seconds."""
    return {
        "id": prefix.id,
        "object": "prefix",
        "model": prefix.model,
        "state": prefix.state,
        **({"message": prefix.trouble} if prefix.trouble else {}),
        "created": int(prefix.created_at),
        "expires_at": int(prefix.expires_at),
        "tokens": prefix.tokens,
        "shards": prefix.shards,
        "backends": [_shown_place(place, prefix, named) for place in prefix.places],
    }


def _shown_place(place: Place, prefix: Prefix, named: Callable[[str], str]) -> dict[str, Any]:
    shown_place = {"backend": named(place.backend), "pool": place.pool, "held_tokens": place.held_tokens}
    shown_place |= {"pinned_tokens": place.pinned_tokens}
    shown_place["pinned_until"] = int(prefix.expires_at) if place.pinned_tokens else None
    if not place.can_pin:
        shown_place["message"] = "this backend cannot pin: it may evict the prefix at any time"
    elif place.pinned_tokens < place.held_tokens:
        shown_place["message"] = "there is no room to pin the rest, which may be evicted"
    return shown_place


def _refuse_unknown(body: Mapping[str, Any], kind: type[Common]) -> None:
    """Raise InvalidRequest for a field that neither `kind` nor this API has."""
    known = {*_OWN_FIELDS, *_ENGINES, *kind.__struct_fields__}
    for name, value in body.items():
        if name not in known and value is not None:
            hint = did_you_mean(name, known) or "docs/prefixes.md lists the fields"
            raise InvalidRequest(f"`{name[:80]}` is not a field of this API", hint=hint, param=name[:80])


def _chat(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """The Ask of a conversation that stays open: prompts may continue its last message, or add messages."""
    ask = written(chat_ask(body, headers))
    (chat,) = ask.inputs
    assert isinstance(chat, Chat), "chat_ask gives chats"
    if not str(chat.messages[-1]["content"]).strip():
        raise InvalidRequest("the last message is empty", hint="end with the document", param="messages")
    return replace(ask, inputs=(replace(chat, opens_answer=False, continues=True),), path=CHAT_PATH)


def _text(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    ask = completion_ask(body, headers)
    if len(ask.inputs) != 1:
        raise InvalidRequest("a prefix is one prompt", hint="send one request for each", param="prompt")
    return replace(ask, path=COMPLETION_PATH)


def ttl_seconds(ttl: str | float) -> float:
    """The seconds that `ttl` says. Raises InvalidRequest."""
    try:
        seconds = ttl if isinstance(ttl, int | float) else read_seconds(ttl)
    except ValueError as error:
        raise InvalidRequest(f"ttl: {error}", hint=_HINTS["ttl"], param="ttl") from None
    # a number of JSON may have any length, and is not made a float before
    if not 1 <= seconds <= MOST_TTL_S:
        most = written_seconds(MOST_TTL_S)
        raise InvalidRequest(f"ttl must be from 1s to {most}", hint=_HINTS["ttl"], param="ttl")
    return float(seconds)


def _reply(body: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(body), {"Content-Type": "application/json"})
