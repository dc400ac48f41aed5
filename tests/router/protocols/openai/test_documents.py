"""`documents` and `document_order` of a chat: what they become, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.errors import InvalidRequest
from router.ask import AskDocument, Documents
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
        ({"documents": [7]}, "documents[0]", "Expected `str | object`, got `int`"),
        ({"documents": [{"title": "Foxes"}]}, "documents[0].text", "neither text nor id"),
        ({"documents": [{"id": "fox"}]}, "documents[0].text", "documents[0] has no text"),
        ({"documents": [{"text": 3}]}, "documents[0].text", "Expected `str | null`, got `int`"),
        ({"documents": [{"text": " "}]}, "documents[0].text", "the text is empty"),
        ({"documents": [{"text": "a", "id": 7}]}, "documents[0].id", "Expected `str | null`, got `int`"),
        ({"documents": [{"text": "a", "id": ""}]}, "documents[0].id", "length >= 1"),
        ({"documents": [{"text": "a", "id": "x" * 129}]}, "documents[0].id", "length <= 128"),
        ({"documents": [{"text": "a", "id": "x\ny"}]}, "documents[0].id", "cannot be shown"),
        ({"documents": [FOX, {**FOX, "text": "else"}]}, "documents[1].id", "another document has the id 'fox'"),
        ({"documents": [{"text": "a"}] * (MOST_DOCUMENTS + 1)}, "documents", "length <= 512"),
        ({"documents": [{"text": "a" * (MOST_CHARACTERS + 1)}]}, "documents", "4,194,305 characters are too many"),
        ({"document_order": "best"}, "document_order", "`document_order` is 'best'"),
        ({"document_order": "any after two"}, "document_order", "is 'any after two'"),
        ({"document_set": ""}, "document_set", "length >= 1"),
        ({"documents": None, "document_order": "any"}, "document_order", "needs `documents`"),
        ({"documents": None, "reuse": "chunks"}, "reuse", "needs `documents`"),
        ({"documents": None, "reuse_budget": 0.1}, "reuse_budget", "needs `documents`"),
        ({"reuse": "some"}, "reuse", "Invalid enum value 'some'"),
        ({"reuse": "chunks", "reuse_budget": 2}, "reuse_budget", "<= 1"),
        ({"reuse_budget": 0.1}, "reuse_budget", "needs `reuse`"),
    ],
)
def test_bad_documents_are_refused_with_the_place_and_a_hint(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_ask(a_body(**fields))
    assert caught.value.param == param
    assert message in caught.value.message
    assert caught.value.hint


def test_documents_of_cohere_are_texts_or_have_data() -> None:
    ask = chat_ask(a_body(documents=["The fox.", {"id": "d", "data": {"text": "The dog.", "title": "Dogs"}}]))
    assert ask.documents is not None
    fox, dog = ask.documents.each
    assert (fox.text, len(fox.id)) == ("The fox.", 8)
    assert dog == AskDocument("d", "The dog.", "Dogs")


def test_any_order_may_keep_the_first_in_front() -> None:
    ask = chat_ask(a_body(document_order="any after 2"))
    assert ask.documents is not None
    assert (ask.documents.is_free, ask.documents.leading) == (True, 2)


def test_documents_of_a_set_need_no_text() -> None:
    ask = chat_ask(a_body(documents=[{"id": "fox"}], document_set="animals"))
    assert ask.documents is not None
    assert (ask.documents.each, ask.documents.of_set) == ((AskDocument("fox", ""),), "animals")
    (body,) = chat_ask({"model": MODEL, "messages": [{"role": "user", "content": "?"}], "document_set": "a"}).bodies
    assert body == {"model": MODEL, "messages": [{"role": "user", "content": f"{MARK}?"}]}


BLOCK = """{{documents any after 1}}
{{document fox: Foxes}}
The fox is quick.

It is brown.
{{document dog}}
The dog is lazy.
{{/documents}}

Which?"""


def test_a_client_that_can_only_change_text_marks_documents_in_it() -> None:
    ask = chat_ask({"model": MODEL, "messages": [{"role": "user", "content": f"Read:\n{BLOCK}"}]})
    fox, dog = AskDocument("fox", "The fox is quick.\n\nIt is brown.", "Foxes"), AskDocument("dog", "The dog is lazy.")
    assert ask.documents == Documents((fox, dog), is_free=True, leading=1)
    assert ask.bodies[0]["messages"] == [{"role": "user", "content": f"Read:\n{MARK}\n\nWhich?"}]


def test_marked_documents_of_later_messages_stay_where_they_are_as_text() -> None:
    parts = [{"type": "text", "text": BLOCK}]
    turns = [
        {"role": "user", "content": BLOCK},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": parts},
    ]
    ask = chat_ask({"model": MODEL, "messages": turns})
    assert ask.documents is not None
    assert len(ask.documents.each) == 2
    first, _, last = ask.bodies[0]["messages"]
    assert first["content"] == f"{MARK}\n\nWhich?"
    assert last["content"][0]["text"].startswith(
        "Documents:\n\nDocument fox: Foxes\nThe fox is quick.\n\nIt is brown.\n\n"
    )
    assert last["content"][0]["text"].endswith("Document dog\nThe dog is lazy.\n\n\n\nWhich?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{documents any}}\nfox\n{{/documents}}", "text stands before the first document"),
        ("{{documents any}}\n{{document fox}}\n \n{{/documents}}", "the text is empty"),
    ],
)
def test_marks_that_make_no_documents_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chat_ask({"model": MODEL, "messages": [{"role": "user", "content": text}]})


def test_documents_in_a_message_and_beside_it_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="both a message and the request"):
        chat_ask(a_body({"role": "user", "content": BLOCK}))


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


def test_the_example_of_docs_rag_md_is_two_documents_in_any_order() -> None:
    page = (Path(__file__).parents[4] / "docs/rag.md").read_text()
    example = page[page.index("{{documents any}}") : page.index("```", page.index("{{/documents}}"))]
    ask = chat_ask({"model": MODEL, "messages": [{"role": "user", "content": example}]})
    assert ask.documents is not None
    assert [document.id for document in ask.documents.each] == ["mill", "pier"]
    assert ask.documents.is_free
