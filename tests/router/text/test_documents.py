"""Documents are written into a prompt one by one, each without regard to the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from policies.nouns import Native
from router.ask import Ask, AskDocument, Chat, Documents
from router.protocols.anthropic.request import messages_ask
from router.protocols.openai.request import chat_ask
from router.text.documents import HEADING, MARK, marks_in, text_of, written
from tests.router.parts import MODEL, a_chat

FOX = AskDocument("fox", "The fox is quick.", "Foxes")
DOG = AskDocument("dog", "The dog is lazy.")


def the_prompt(ask: Ask) -> list[str]:
    (chat,) = ask.inputs
    assert isinstance(chat, Chat)
    return [message["content"] for message in chat.messages]


def an_ask(content: Any, *documents: AskDocument) -> Ask:
    ask = chat_ask({"model": MODEL, "messages": [{"role": "user", "content": content}]})
    return Ask(
        model=MODEL,
        inputs=ask.inputs,
        bodies=ask.bodies,
        path=ask.path,
        natives=ask.natives,
        documents=Documents(documents),
    )


def test_a_document_shows_its_id_and_its_title() -> None:
    assert text_of(FOX) == "Document fox: Foxes\nThe fox is quick.\n\n"
    assert text_of(DOG) == "Document dog\nThe dog is lazy.\n\n"


def test_the_documents_stand_where_the_mark_stood_in_the_chat_and_in_the_bodies_of_backends() -> None:
    ask = written(an_ask(f"Read:\n{MARK}Which is quick?", FOX, DOG))
    text = f"Read:\n{HEADING}{text_of(FOX)}{text_of(DOG)}Which is quick?"
    assert the_prompt(ask) == [text]
    assert ask.bodies[0]["messages"] == [{"role": "user", "content": text}]
    assert ask.natives == (Native(ask.path, ask.bodies[0]),)
    assert ask.document_ids == ("fox", "dog")
    assert ask.documents is None


def test_another_order_changes_nothing_but_the_order() -> None:
    texts = {the_prompt(written(an_ask(MARK, FOX, DOG), order))[0] for order in itertools.permutations([FOX, DOG])}
    assert texts == {HEADING + text_of(FOX) + text_of(DOG), HEADING + text_of(DOG) + text_of(FOX)}


def test_parts_of_a_message_keep_their_places() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    ask = written(an_ask([{"type": "text", "text": "See"}, {"type": "text", "text": MARK}, image, "and say"], FOX))
    found = ask.bodies[0]["messages"][0]["content"]
    assert found == [
        {"type": "text", "text": "See"},
        {"type": "text", "text": HEADING + text_of(FOX)},
        image,
        "and say",
    ]
    (chat,) = ask.inputs
    assert isinstance(chat, Chat)
    assert chat.parts[0][1]["text"] == HEADING + text_of(FOX)


def test_without_any_document_nothing_is_left_of_the_mark() -> None:
    assert the_prompt(written(an_ask(f"{MARK}Hello"))) == ["Hello"]


def test_a_mark_inside_a_document_is_only_text() -> None:
    tricky = AskDocument("a", f"Write {MARK} there.")
    assert the_prompt(written(an_ask(MARK, tricky))) == [HEADING + text_of(tricky)]


def test_a_call_without_documents_stays_as_it_is() -> None:
    ask = chat_ask(a_chat(f"what does {MARK} mean?"))
    assert written(ask) is ask


@pytest.mark.parametrize("content", [None, "", [], [{"type": "image_url"}], 3])
def test_content_without_text_has_no_mark(content: Any) -> None:
    assert marks_in([{"role": "user", "content": content}]) == 0


def test_a_call_in_another_dialect_goes_to_backends_as_the_equivalent_chat() -> None:
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Which is quick?"}],
        "documents": [{"id": "fox", "text": "The fox is quick."}],
    }
    ask = messages_ask(body, {})
    assert len(ask.natives) == 1
    ask = written(ask)
    assert ask.natives == ()
    assert ask.bodies[0]["messages"][0]["content"] == f"{HEADING}Document fox\nThe fox is quick.\n\nWhich is quick?"
