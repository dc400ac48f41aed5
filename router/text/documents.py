"""Documents of a request as text in its prompt.

Each document is written by itself: its text depends neither on its place nor on its neighbours, and begins behind a
line break with a letter, where tokenizers have a boundary. So the same documents behind the same ones give the same
tokens, and each of them can be tokenized alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

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

    An Ask without documents comes back as it is.
    """
    if ask.documents is None:
        return ask
    documents = ask.documents.each if documents is None else documents
    text = HEADING + "".join(map(text_of, documents)) if documents else ""
    # an API of its own shape may have no place for them: then its backends get the equivalent chat
    natives = tuple(native for native in ask.natives if marks_in(_messages(native.body)))
    return replace(
        ask,
        inputs=tuple(_input(given, text) for given in ask.inputs),
        bodies=tuple(_body(body, text) for body in ask.bodies),
        natives=tuple(Native(native.path, _body(native.body, text)) for native in natives),
        documents=None,
        document_ids=tuple(document.id for document in documents),
    )


def marks_in(messages: Iterable[Mapping[str, Any]]) -> int:
    """How often MARK stands in the texts of `messages`."""
    return sum(text.count(MARK) for message in messages for text in _texts(message.get("content")))


def _texts(content: Any) -> list[str]:
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


def _input(given: Input, text: str) -> Input:
    if not isinstance(given, Chat):
        return given
    parts = {at: [_part(part, text) for part in parts] for at, parts in given.parts.items()}
    messages = [_message(message, text) for message in given.messages]
    return replace(given, messages=messages, parts=parts, starts=START if text else "")


def _body(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    filled = {**body, "messages": [_message(message, text) for message in body["messages"]]}
    return {**filled, "system": _content(body["system"], text)} if "system" in body else filled


def _message(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    content = message.get("content")
    filled = _content(content, text)
    return message if filled is content else {**message, "content": filled}


def _content(content: Any, text: str) -> Any:
    """`content`, the same object if MARK is not in it."""
    if not any(MARK in found for found in _texts(content)):
        return content
    return content.replace(MARK, text) if isinstance(content, str) else [_part(part, text) for part in content]


def _part(part: Any, text: str) -> Any:
    if isinstance(part, str):
        return part.replace(MARK, text)
    if isinstance(part, Mapping) and isinstance(found := part.get("text"), str) and MARK in found:
        return {**part, "text": found.replace(MARK, text)}
    return part
