"""Documents of a request as text in its prompt.

Each document is written by itself: its text depends neither on its place nor on its neighbours, and begins behind a
line break with a letter, where tokenizers have a boundary. So the same documents behind the same ones give the same
tokens, and each of them can be tokenized alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from policies.errors import InvalidRequest
from policies.nouns import Native
from router.ask import Ask, AskDocument, Chat, Input

MARK = "{{documents}}"
"""Stands in a message where the documents go."""

HEADING = "Documents:\n\n"
"""Begins the text of all documents."""

START = "Document "
"""Begins the text of each document, in a new line."""

COPIES = 5
"""Copies of the documents' text that a call has at once: written, in the chat, in a body, and in the bytes of both."""


def text_of(document: AskDocument) -> str:
    """`document` as it stands in a prompt, between a line break and the next document."""
    title = f": {document.title}" if document.title else ""
    return f"{START}{document.id}{title}\n{document.text}\n\n"


def written(ask: Ask, documents: Sequence[AskDocument] | None = None) -> Ask:
    """`ask` with `documents`, in this order, as text in place of MARK; without any given, in the client's order.

    An Ask without documents comes back as it is. Raises InvalidRequest for documents of a set without their texts.
    """
    if ask.documents is None:
        return ask
    documents = ask.documents.each if documents is None else documents
    if not all(document.text for document in documents) or (ask.documents.of_set and not documents):
        hint = "send each document with its `text`"
        raise InvalidRequest("only chats take documents from a document set", hint=hint, param="document_set")
    text = text_of_all(documents)
    # an API of its own shape may have no place for them: then its backends get the equivalent chat
    natives = tuple(native for native in ask.natives if marks_in(_messages(native.body)))
    return replace(
        ask,
        inputs=tuple(_input(given, text) for given in ask.inputs),
        bodies=tuple(_body(body, text) for body in ask.bodies),
        natives=tuple(Native(native.path, _body(native.body, text)) for native in natives),
        documents=None,
        document_ids=tuple(document.id for document in documents),
        reuse_budget=ask.documents.reuse_budget,
    )


def text_of_all(documents: Sequence[AskDocument]) -> str:
    """`documents` as they stand in a prompt, behind their heading; nothing if there are none."""
    return HEADING + "".join(map(text_of, documents)) if documents else ""


def marks_in(messages: Iterable[Mapping[str, Any]]) -> int:
    """How often MARK stands in the texts of `messages`."""
    return sum(text.count(MARK) for message in messages for text in texts_of(message.get("content")))


def texts_of(content: Any) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _messages(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The messages of `body`; Anthropic's system text is one too."""
    yield {"content": body.get("system")}
    messages = body.get("messages")
    yield from messages if isinstance(messages, list) else ()


def with_texts(message: Mapping[str, Any], change: Callable[[str], str]) -> Mapping[str, Any]:
    """`message` with the change of each text of its content."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        return {**message, "content": [_changed(part, change) for part in content]}
    return message


def _input(given: Input, text: str) -> Input:
    if not isinstance(given, Chat):
        return given
    parts = {at: [_changed(part, _filling(text)) for part in parts] for at, parts in given.parts.items()}
    messages = [_message(message, text) for message in given.messages]
    return replace(given, messages=messages, parts=parts, starts=START if text else "")


def _body(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    filled = {**body, "messages": [_message(message, text) for message in body["messages"]]}
    return {**filled, "system": _message({"content": body["system"]}, text)["content"]} if "system" in body else filled


def _message(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """`message`, the same object if MARK is not in it."""
    if not any(MARK in found for found in texts_of(message.get("content"))):
        return message
    return with_texts(message, _filling(text))


def _filling(text: str) -> Callable[[str], str]:
    return lambda found: found.replace(MARK, text)


def _changed(part: Any, change: Callable[[str], str]) -> Any:
    if isinstance(part, str):
        return change(part)
    if isinstance(part, Mapping) and isinstance(found := part.get("text"), str):
        return {**part, "text": change(found)}
    return part
