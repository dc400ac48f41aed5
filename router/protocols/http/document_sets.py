"""`/v1/document_sets`: store documents under a name, have them computed, list them with their use, drop them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from http1.request import Request, Response
from policies.errors import InvalidRequest
from policies.nouns import Tenant
from policies.suggest import did_you_mean
from router.ask import Ask, AskDocument, Chat
from router.call.bodies import Bodies, Held
from router.call.warming import as_warm_up
from router.protocols.dialect import converted
from router.protocols.http.body import ReadBody
from router.protocols.http.prefixes import Identify, ttl_seconds
from router.protocols.http.routes import Routes
from router.protocols.openai.documents import documents_of
from router.protocols.openai.fields import MOST_ID_CHARACTERS, DocumentFields
from router.protocols.openai.request import CHAT_PATH, chat_ask
from router.shared.documents.document_set import AUTO, DocumentSet, Note, Uses
from router.shared.documents.sets import MOST_DOCUMENTS, DocumentSets, SetWish, Shown
from router.text.documents import MARK, written

SETS_PATH = "/v1/document_sets"

USUAL_TTL_S = 86_400.0

_HINTS = {
    "documents": f"at most {MOST_DOCUMENTS:,} objects such as {{'id': 'a', 'title': 'A', 'text': 'A is ...'}}",
    "model": "the model that the documents are computed for: GET /v1/models lists the models",
    "messages": "what stands before the documents in later chats: the system's message, or leave it out",
    "shards": "the number of backends that have each document, from 1 to 64; without it as many as its use requires",
    "ttl": "how long to keep the set: 30m, 2h, 7d, or a number of seconds",
}


class SetBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of PUT and POST."""

    documents: Annotated[list[DocumentFields | str], Meta(max_length=MOST_DOCUMENTS)]
    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    shards: Annotated[int, Meta(ge=1, le=64)] | None = None
    ttl: str | float | int = USUAL_TTL_S


class RefreshBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of PATCH."""

    ttl: str | float | int = USUAL_TTL_S


class Upload(NamedTuple):
    """A parsed body: the documents, and what the set should be."""

    documents: Sequence[AskDocument]
    wish: SetWish


def upload_of(body: Mapping[str, Any]) -> Upload:
    """The Upload in `body`. Raises InvalidRequest."""
    _refuse_unknown(body, SetBody)
    fields = converted(body, SetBody, hints=_HINTS, elsewhere="docs/rag.md lists the fields")
    if fields.model is None and (fields.messages or fields.shards):
        hint = "name the `model` that the documents are computed for, or leave `messages` and `shards` out"
        raise InvalidRequest("`messages` and `shards` need `model`", hint=hint, param="model")
    documents = documents_of(fields.documents)
    for at, document in enumerate(documents):
        if not document.text:
            raise InvalidRequest(f"documents[{at}] has no text", hint="send its `text`", param=f"documents[{at}].text")
        if not _is_unicode(document.text) or not _is_unicode(document.title):
            hint = "send text without unpaired surrogates"
            raise InvalidRequest(f"documents[{at}]: not valid Unicode", hint=hint, param=f"documents[{at}].text")
    wish = SetWish(
        ttl_seconds(fields.ttl),
        fields.model or "",
        msgspec.json.encode(fields.messages or []),
        fields.shards or AUTO,
    )
    if wish.model:
        # what is wrong with the messages is said now, and not in a state of the set
        computing_ask(_a_set(wish), AskDocument("a", "text"))
    return Upload(documents, wish)


def computing_ask(kept: DocumentSet, document: AskDocument) -> Ask:
    """The Ask that computes `document` as the first one behind the head of `kept`. Raises InvalidRequest."""
    head = msgspec.json.decode(kept.head) or [{"role": "user", "content": ""}]
    fields = {"id": document.id, "title": document.title, "text": document.text}
    ask = chat_ask({"model": kept.model, "messages": head, "documents": [fields], "max_tokens": 1, "stream": False})
    ask = written(_cut(ask))
    (chat,) = ask.inputs
    assert isinstance(chat, Chat), "chat_ask gives chats"
    open_chat = replace(chat, opens_answer=False, continues=True)
    return as_warm_up(replace(ask, inputs=(open_chat,), natives=(), path=CHAT_PATH), ask.bodies[0], must_pin=False)


def add_document_sets(
    routes: Routes,
    sets: DocumentSets,
    bodies: Bodies,
    find_model: Callable[[str, Tenant], object],
    identify: Identify,
    read: ReadBody,
) -> None:
    """Add the calls to `routes`; `identify` finds the tenant, `read` parses the body. `find_model` raises for a model
    that the tenant does not have."""

    async def upload(http: Request, name: str, *, adds: bool) -> Response:
        tenant, name = await identify(http), _name(name)
        with Held(bodies, tenant.name) as held:
            documents, wish = await read(http, held, upload_of)
            if wish.model:
                find_model(wish.model, tenant)
            await sets.put(name, tenant, documents, wish, adds=adds)
        return _reply(shown_set(await sets.shown(name, tenant.name)))

    async def put(http: Request, name: str) -> Response:
        return await upload(http, name, adds=False)

    async def add(http: Request, name: str) -> Response:
        return await upload(http, name, adds=True)

    async def refresh(http: Request, name: str) -> Response:
        tenant, name = await identify(http), _name(name)
        with Held(bodies, tenant.name) as held:
            ttl_s = await read(http, held, _ttl_of)
            await sets.refresh(name, tenant, ttl_s)
        return _reply(shown_set(await sets.shown(name, tenant.name)))

    async def show_all(http: Request) -> Response:
        found = await sets.of((await identify(http)).name)
        return _reply({"object": "list", "data": [_head_of(kept) for kept in found]})

    async def show(http: Request, name: str) -> Response:
        return _reply(shown_set(await sets.shown(_name(name), (await identify(http)).name)))

    async def delete(http: Request, name: str) -> Response:
        kept = await sets.drop(_name(name), await identify(http))
        return _reply({"id": kept.name, "object": "document_set", "deleted": True})

    async def delete_document(http: Request, name: str, id: str) -> Response:  # noqa: A002 - it is the document's
        await sets.remove(_name(name), await identify(http), unquote(id))
        return _reply({"id": unquote(id), "object": "document", "deleted": True})

    routes.add("GET", SETS_PATH, show_all)
    for method, handler in (("PUT", put), ("POST", add), ("PATCH", refresh), ("GET", show), ("DELETE", delete)):
        routes.add(method, f"{SETS_PATH}/{{name}}", handler)
    routes.add("DELETE", f"{SETS_PATH}/{{name}}/documents/{{id:path}}", delete_document)


def shown_set(shown: Shown) -> dict[str, Any]:
    """A set as clients see it, with the progress and use of its documents. Times are Unix times in whole seconds."""
    kept, states, notes, uses = shown
    counts = Counter(states.values())
    return {
        **_head_of(kept),
        "progress": dict(sorted(counts.items())),
        "unused": sum(not uses.get(entry.id, Uses()).requests for entry in kept.entries),
        "documents": [
            {
                "id": entry.id,
                "title": entry.title,
                "bytes": entry.size,
                "state": states[entry.id],
                **_shown_note(notes.get(entry.id, Note())),
                "usage": _shown_uses(uses.get(entry.id, Uses())),
            }
            for entry in kept.entries
        ],
    }


def _head_of(kept: DocumentSet) -> dict[str, Any]:
    return {
        "id": kept.name,
        "object": "document_set",
        "version": kept.version,
        "created": int(kept.created_at),
        "expires_at": int(kept.expires_at),
        "count": len(kept.entries),
        "bytes": kept.size,
        "model": kept.model or None,
        "shards": kept.shards or None,
    }


def _shown_note(note: Note) -> dict[str, str]:
    found = {"prefix": note.prefix, "message": note.trouble}
    return {name: value for name, value in found.items() if value}


def _shown_uses(uses: Uses) -> dict[str, Any]:
    return {
        "requests": uses.requests,
        "cached_tokens": uses.cached_tokens,
        "saved_seconds": round(uses.saved_s, 3),
        "saved_cost": uses.saved_cost,
        "last_used": int(uses.last_at) or None,
    }


def _cut(ask: Ask) -> Ask:
    """`ask` up to the mark for its documents."""
    (chat,) = ask.inputs
    assert isinstance(chat, Chat), "chat_ask gives chats"
    messages = list[Mapping[str, Any]]()
    for message in chat.messages:
        before, mark, _ = str(message.get("content") or "").partition(MARK)
        messages.append({**message, "content": before + mark} if mark else message)
        if mark:
            break
    return replace(
        ask,
        inputs=(replace(chat, messages=messages, parts={}),),
        bodies=({**ask.bodies[0], "messages": messages},),
    )


def _a_set(wish: SetWish) -> DocumentSet:
    return DocumentSet("", "", 0, 0, 0.0, 0.0, (), model=wish.model, head=wish.head)


def _ttl_of(body: Mapping[str, Any]) -> float:
    _refuse_unknown(body, RefreshBody)
    return ttl_seconds(converted(body, RefreshBody, hints=_HINTS, elsewhere="docs/rag.md lists the fields").ttl)


def _refuse_unknown(body: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    for name in body:
        if name not in kind.__struct_fields__:
            hint = did_you_mean(name, kind.__struct_fields__) or "docs/rag.md lists the fields"
            raise InvalidRequest(f"`{name[:80]}` is not a field of this API", hint=hint, param=name[:80])


def _name(raw: str) -> str:
    """The name of a set in a path. Raises InvalidRequest."""
    name = unquote(raw)
    if not name.isprintable() or not name.strip() or len(name) > MOST_ID_CHARACTERS:
        hint = f"a name is a text of at most {MOST_ID_CHARACTERS} printable characters"
        raise InvalidRequest("this is no name of a document set", hint=hint, param="name")
    return name


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _reply(body: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(body), {"Content-Type": "application/json"})
