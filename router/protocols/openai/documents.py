"""Documents beside the messages of a chat: `documents` and `document_order` become Documents, and a mark in a message.

Sources: vLLM's and Cohere's `documents`, chat templates of Hugging Face's models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_hexdigest

from policies.errors import InvalidRequest
from router.ask import AskDocument, Documents
from router.protocols.openai.fields import ChatBody, DocumentFields
from router.text.documents import MARK, marks_in

MOST_CHARACTERS = 4 * 2**20
"""Most characters of all documents of a request."""

_ID_DIGITS = 8
"""Hexadecimal digits of the id of a document without one."""

OWN_FIELDS = ("documents", "document_order")
"""Members of a body that the router reads in place of its backends."""


def documents_in(fields: ChatBody) -> Documents | None:
    """The documents of a request; None if it has no such field. Raises InvalidRequest."""
    if fields.documents is None:
        if fields.document_order is not None:
            hint = "send `documents`, or leave `document_order` out"
            raise InvalidRequest("`document_order` needs `documents`", hint=hint, param="document_order")
        return None
    each = tuple(_document(document, at) for at, document in enumerate(fields.documents))
    characters = sum(len(document.text) + len(document.title) for document in each)
    if characters > MOST_CHARACTERS:
        hint = f"send at most {MOST_CHARACTERS:,} characters in all documents of a request"
        raise InvalidRequest(f"documents: {characters:,} characters are too many", hint=hint, param="documents")
    known: dict[str, AskDocument] = {}
    for at, document in enumerate(each):
        if known.setdefault(document.id, document) != document:
            hint = "give each document an id of its own, or none"
            message = f"documents[{at}]: another document has the id '{document.id[:80]}'"
            raise InvalidRequest(message, hint=hint, param=f"documents[{at}].id")
    return Documents(each, is_free=fields.document_order == "any")


def marked(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` without its documents, and with MARK in the one place where they go.

    That is where the client put it, else the end of the first message if that is the system's or a developer's, else
    the beginning of the first message of the user. Raises InvalidRequest.
    """
    rest = {name: value for name, value in body.items() if name not in OWN_FIELDS}
    marks = marks_in(body["messages"])
    if marks > 1:
        hint = f"leave {MARK} in one message only"
        raise InvalidRequest(f"messages: {MARK} stands {marks} times", hint=hint, param="messages")
    # a retrieval may have found nothing: then no message changes
    return rest if marks or not body["documents"] else {**rest, "messages": _with_mark(body["messages"])}


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": _behind(first.get("content"))}, *messages[1:]]
    for at, message in enumerate(messages):
        if message["role"] == "user":
            return [*messages[:at], {**message, "content": _before(message.get("content"))}, *messages[at + 1 :]]
    hint = f"write {MARK} into the message where they go"
    raise InvalidRequest("no message of a system or a user takes the documents", hint=hint, param="messages")


def _behind(content: Any) -> Any:
    """`content` of a system message, then MARK."""
    if not isinstance(content, list):
        return f"{content}\n\n{MARK}" if content else MARK
    return [*content, {"type": "text", "text": f"\n\n{MARK}" if content else MARK}]


def _before(content: Any) -> Any:
    """MARK, then `content` of a user's message."""
    if not isinstance(content, list):
        return MARK + (content or "")
    return [{"type": "text", "text": MARK}, *content]


def _document(fields: DocumentFields, at: int) -> AskDocument:
    title = " ".join((fields.title or "").split())
    if not fields.text.strip():
        raise InvalidRequest(f"documents[{at}]: the text is empty", hint="leave it out", param=f"documents[{at}].text")
    given = fields.doc_id if fields.id is None else fields.id
    if given is not None and (not given.isprintable() or not given.strip()):
        hint = "an id is a text of printable characters in one line"
        raise InvalidRequest(f"documents[{at}]: this id cannot be shown", hint=hint, param=f"documents[{at}].id")
    # of the contents, so that the same document has the same id in every request
    own = xxh3_64_hexdigest(f"{title}\x00{fields.text}".encode("utf-8", "surrogatepass"))[:_ID_DIGITS]
    return AskDocument(own if given is None else given, fields.text, title)
