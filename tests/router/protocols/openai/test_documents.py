"""`documents` and `document_order` of a chat: what they become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from policies.errors import InvalidRequest
from router.ask import AskDocument
from router.protocols.openai.documents import MOST_CHARACTERS
from router.protocols.openai.fields import MOST_DOCUMENTS
from router.protocols.openai.request import chat_ask
from router.text.documents import MARK
from tests.router.parts import MODEL

FOX = {"id": "fox", "title": "Foxes", "text": "The fox is quick."}


def a_body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    chat = [*messages] or [{"role": "user", "content": "Which?"}]
    return {"model": MODEL, "messages": chat, "documents": [FOX], **fields}


def contents(body: dict[str, Any]) -> list[Any]:
    return [message["content"] for message in chat_ask(body).bodies[0]["messages"]]


def test_documents_have_an_id_a_title_and_a_text() -> None:
    ask = chat_ask(a_body(documents=[FOX, {"doc_id": "dog", "title": " The\nlazy  dog ", "text": "lies"}]))
    assert ask.documents is not None
    fox, dog = AskDocument("fox", "The fox is quick.", "Foxes"), AskDocument("dog", "lies", "The lazy dog")
    assert ask.documents.each == (fox, dog)
    assert not ask.documents.is_free


def test_a_document_without_an_id_has_one_of_its_contents() -> None:
    asks = [chat_ask(a_body(documents=documents)) for documents in ([{"text": "a"}], [{"text": "b"}, {"text": "a"}])]
    ids = [[document.id for document in ask.documents.each] for ask in asks if ask.documents is not None]
    assert ids[0] == ids[1][1:]
    assert len({*ids[1]}) == 2
    assert all(len(each) == 8 for each in ids[1])


def test_backends_get_neither_field() -> None:
    (body,) = chat_ask(a_body(document_order="any")).bodies
    assert body.keys() == {"model", "messages"}


@pytest.mark.parametrize(("order", "is_free"), [("any", True), ("fixed", False), (None, False)])
def test_the_order_is_the_clients_unless_it_leaves_it_open(order: str | None, is_free: bool) -> None:
    ask = chat_ask(a_body(document_order=order))
    assert ask.documents is not None
    assert ask.documents.is_free == is_free


@pytest.mark.parametrize("role", ["system", "developer"])
def test_documents_stand_behind_what_the_system_says(role: str) -> None:
    says, asks = {"role": role, "content": "Be brief."}, {"role": "user", "content": "Which?"}
    assert contents(a_body(says, asks)) == [f"Be brief.\n\n{MARK}", "Which?"]
    parts = [{"type": "text", "text": "Be brief."}]
    assert contents(a_body({**says, "content": parts}, asks))[0] == [*parts, {"type": "text", "text": f"\n\n{MARK}"}]
    assert contents(a_body({**says, "content": ""}, asks))[0] == MARK


def test_without_such_a_message_they_begin_the_first_of_the_user() -> None:
    greeting, question = {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Which?"}
    assert contents(a_body(greeting, question, question)) == ["Hi.", f"{MARK}Which?", "Which?"]
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    assert contents(a_body({"role": "user", "content": parts})) == [[{"type": "text", "text": MARK}, *parts]]


def test_the_client_can_say_where_they_stand() -> None:
    question = {"role": "user", "content": f"Read {MARK} and say"}
    assert contents(a_body({"role": "system", "content": "Be brief."}, question)) == ["Be brief.", question["content"]]


def test_a_retrieval_that_found_nothing_changes_no_message() -> None:
    assert contents(a_body(documents=[], document_order="any")) == ["Which?"]
    assert chat_ask(a_body(documents=None)).documents is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"documents": "fox"}, "documents", "Expected `array | null`, got `str`"),
        ({"documents": ["fox"]}, "documents[0]", "Expected `object`, got `str`"),
        ({"documents": [{"title": "Foxes"}]}, "documents[0].text", "missing required field `text`"),
        ({"documents": [{"text": 3}]}, "documents[0].text", "Expected `str`, got `int`"),
        ({"documents": [{"text": " "}]}, "documents[0].text", "the text is empty"),
        ({"documents": [{"text": "a", "id": 7}]}, "documents[0].id", "Expected `str | null`, got `int`"),
        ({"documents": [{"text": "a", "id": ""}]}, "documents[0].id", "length >= 1"),
        ({"documents": [{"text": "a", "id": "x" * 129}]}, "documents[0].id", "length <= 128"),
        ({"documents": [{"text": "a", "id": "x\ny"}]}, "documents[0].id", "cannot be shown"),
        ({"documents": [FOX, {**FOX, "text": "else"}]}, "documents[1].id", "another document has the id 'fox'"),
        ({"documents": [{"text": "a"}] * (MOST_DOCUMENTS + 1)}, "documents", "length <= 512"),
        ({"documents": [{"text": "a" * (MOST_CHARACTERS + 1)}]}, "documents", "4,194,305 characters are too many"),
        ({"document_order": "best"}, "document_order", "Invalid enum value 'best'"),
        ({"documents": None, "document_order": "any"}, "document_order", "needs `documents`"),
    ],
)
def test_bad_documents_are_refused_with_the_place_and_a_hint(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_ask(a_body(**fields))
    assert caught.value.param == param
    assert message in caught.value.message
    assert caught.value.hint


def test_a_mark_in_two_places_is_refused() -> None:
    question = {"role": "user", "content": f"{MARK} or {MARK}"}
    with pytest.raises(InvalidRequest, match="stands 2 times"):
        chat_ask(a_body(question))


def test_documents_without_a_message_that_takes_them_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="takes the documents"):
        chat_ask(a_body({"role": "assistant", "content": "Hi."}))


def test_the_same_document_twice_is_no_mistake() -> None:
    ask = chat_ask(a_body(documents=[FOX, FOX]))
    assert ask.documents is not None
    assert len(ask.documents.each) == 2
