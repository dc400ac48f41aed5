"""Documents of a chat, beside its messages or in them: they become Documents, and a mark in a message.

Sources: vLLM's and Cohere's `documents`, chat templates of Hugging Face's models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from policies.errors import InvalidRequest
from policies.nouns import USUAL_REUSE_BUDGET
from router.ask import AskDocument, Documents
from router.protocols.openai.fields import ChatBody, DocumentData, DocumentFields
from router.text.documents import MARK, marks_in, text_of_all, with_texts

MOST_CHARACTERS = 4 * 2**20
"""Most characters of all documents of a request."""

_ID_DIGITS = 8
"""Hexadecimal digits of the id of a document without one."""

OWN_FIELDS = frozenset({"documents", "document_set", "document_order", "reuse", "reuse_budget"})
"""Members of a body that the router reads in place of its backends."""

ORDER = re.compile(r"fixed|any(?: after (\d{1,3}))?")
"""Values of `document_order`."""

BLOCK_END = "{{/documents}}"
_BLOCK = re.compile(r"\{\{documents (" + ORDER.pattern + r")\}\}")
_BEGINNING = re.compile(r"^\{\{document ([^:\n{}]+)(?:: ([^\n{}]*))?\}\}\n", re.MULTILINE)


def documents_in(fields: ChatBody) -> Documents | None:
    """The documents of a request; None if it has no such field. Raises InvalidRequest."""
    if fields.documents is None and fields.document_set is None:
        for name in ("document_order", "reuse", "reuse_budget"):
            if getattr(fields, name) is not None:
                hint = f"send `documents`, or leave `{name}` out"
                raise InvalidRequest(f"`{name}` needs `documents`", hint=hint, param=name)
        return None
    each = documents_of(fields.documents or ())
    for at, document in enumerate(each):
        if not document.text and fields.document_set is None:
            hint = "send its `text`, or name the set that has it with `document_set`"
            raise InvalidRequest(f"documents[{at}] has no text", hint=hint, param=f"documents[{at}].text")
    characters = sum(len(document.text) + len(document.title) for document in each)
    if characters > MOST_CHARACTERS:
        hint = f"send at most {MOST_CHARACTERS:,} characters in all documents of a request"
        raise InvalidRequest(f"documents: {characters:,} characters are too many", hint=hint, param="documents")
    is_free, leading = _order(fields.document_order or "fixed")
    of_set, reuse_budget = fields.document_set or "", _reuse_budget(fields)
    return Documents(each, is_free=is_free, leading=leading, of_set=of_set, reuse_budget=reuse_budget)


def documents_of(given: Sequence[DocumentFields | str]) -> tuple[AskDocument, ...]:
    """The documents that a client sent. Raises InvalidRequest, also if two with the same id differ."""
    each = tuple(_document(document, at) for at, document in enumerate(given))
    known: dict[str, AskDocument] = {}
    for at, document in enumerate(each):
        if known.setdefault(document.id, document) != document:
            hint = "give each document an id of its own, or none"
            message = f"documents[{at}]: another document has the id '{document.id[:80]}'"
            raise InvalidRequest(message, hint=hint, param=f"documents[{at}].id")
    return each


def _reuse_budget(fields: ChatBody) -> float | None:
    if fields.reuse == "off":
        return 1.0
    if fields.reuse_budget is not None and fields.reuse is None:
        hint = "send `reuse`: 'chunks' too, or leave `reuse_budget` out"
        raise InvalidRequest("`reuse_budget` needs `reuse`", hint=hint, param="reuse_budget")
    return USUAL_REUSE_BUDGET if fields.reuse and fields.reuse_budget is None else fields.reuse_budget


def lifted(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the documents of the first block in its messages as `documents`, and a mark in its place.

    Blocks of later messages become text where they stand: a conversation that goes on begins as before. Raises
    InvalidRequest.
    """
    if body.get("documents") is not None or body.get("document_set") is not None:
        hint = "send the documents in one of the two"
        raise InvalidRequest("both a message and the request have documents", hint=hint, param="documents")
    found: dict[str, Any] = {}

    def in_text(text: str) -> str:
        parts, done = list[str](), 0
        while (block := _BLOCK.search(text, done)) is not None and (end := text.find(BLOCK_END, block.end())) >= 0:
            parts += text[done : block.start()], in_block(block[1], text[block.end() : end])
            done = end + len(BLOCK_END)
        return "".join((*parts, text[done:])) if parts else text

    def in_block(order: str, inside: str) -> str:
        documents = _documents_in(inside)
        if "documents" not in found:
            found.update(documents=documents, document_order=order)
            return MARK
        return text_of_all([_document(DocumentFields(**each), at) for at, each in enumerate(documents)])

    messages = [with_texts(message, in_text) for message in body["messages"]]
    return {**body, "messages": messages, **found}


def _documents_in(block: str) -> list[dict[str, str]]:
    """The documents between the marks of a block. Raises InvalidRequest."""
    before, *rest = _BEGINNING.split(block)
    if before.strip():
        hint = "begin each document with a line such as {{document mill: The Amber mill}}"
        raise InvalidRequest("messages: text stands before the first document", hint=hint, param="messages")
    triples = zip(rest[0::3], rest[1::3], rest[2::3], strict=True)
    return [{"id": name.strip(), "title": title or "", "text": text.strip("\n")} for name, title, text in triples]


def _order(order: str) -> tuple[bool, int]:
    """Whether the order is free, and how many of the first documents stay in front. Raises InvalidRequest."""
    found = ORDER.fullmatch(order)
    if found is None:
        hint = "'fixed' keeps the client's order, 'any' lets the router choose it, 'any after 2' behind the first two"
        raise InvalidRequest(f"`document_order` is '{order}'", hint=hint, param="document_order")
    return order != "fixed", int(found[1] or 0)


def marked(body: Mapping[str, Any], *, is_empty: bool) -> dict[str, Any]:
    """`body` without its documents, and with MARK in the one place where they go; nowhere if it `is_empty`.

    That is where the client put it, else the end of the first message if that is the system's or a developer's, else
    the beginning of the first message of the user. Raises InvalidRequest.
    """
    rest = {name: value for name, value in body.items() if name not in OWN_FIELDS}
    marks = marks_in(body["messages"])
    if marks > 1:
        hint = f"leave {MARK} in one message only"
        raise InvalidRequest(f"messages: {MARK} stands {marks} times", hint=hint, param="messages")
    # a retrieval may have found nothing: then no message changes
    return rest if marks or is_empty else {**rest, "messages": _with_mark(body["messages"])}


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


def _document(given: DocumentFields | str, at: int) -> AskDocument:
    fields = DocumentFields(text=given) if isinstance(given, str) else given
    if fields.data is not None:
        data = DocumentData(fields.data) if isinstance(fields.data, str) else fields.data
        fields = replace(fields, text=data.text, title=data.title or fields.title)
    title, name = " ".join((fields.title or "").split()), fields.doc_id if fields.id is None else fields.id
    if name is not None and (not name.isprintable() or not name.strip()):
        hint = "an id is a text of printable characters in one line"
        raise InvalidRequest(f"documents[{at}]: this id cannot be shown", hint=hint, param=f"documents[{at}].id")
    if fields.text is None:
        if name is None:
            hint = "send its `text`, or the `id` that it has in a document set"
            raise InvalidRequest(f"documents[{at}] has neither text nor id", hint=hint, param=f"documents[{at}].text")
        return AskDocument(name, "", title)
    if not fields.text.strip():
        raise InvalidRequest(f"documents[{at}]: the text is empty", hint="leave it out", param=f"documents[{at}].text")
    return AskDocument(own_id(title, fields.text) if name is None else name, fields.text, title)


def own_id(title: str, text: str) -> str:
    """The id of a document without one: of its contents, so that it is the same in every request."""
    return xxh3_64_hexdigest(f"{title}\x00{text}".encode("utf-8", "surrogatepass"))[:_ID_DIGITS]
