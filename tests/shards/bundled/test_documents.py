"""The generator of documents: the same by seed, answerable from its text, within the length it promises."""

from __future__ import annotations

import json
import random

import jinja2
import pytest
from tokenizers import Tokenizer

from shards.bundled import documents, weights

LENGTHS = (200, 500, 1000, 1500, 2000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(weights() / "tokenizer.json"))


def test_the_same_seed_gives_the_same_document() -> None:
    assert documents.document(random.Random(3), 40) == documents.document(random.Random(3), 40)
    assert documents.document(random.Random(3), 40) != documents.document(random.Random(4), 40)


@pytest.mark.parametrize("facts", [1, 14, 161])
def test_every_question_is_answered_by_one_sentence_of_the_text(facts: int) -> None:
    about = documents.document(random.Random(facts), facts)
    assert len(about.questions) == len({question.question for question in about.questions}) == facts
    for question in about.questions:
        assert about.text.count(question.answer.rpartition(question.needle)[0]) == 1
        assert question.answer in about.text
        assert question.needle in question.answer


def test_a_document_of_more_facts_than_there_are_things_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot state"):
        documents.document(random.Random(1), 5000)


def test_the_splits_share_no_entity() -> None:
    held_out = set(documents.entities("held-out"))
    assert held_out.isdisjoint(documents.entities("train"))
    assert len(held_out) > 200


def test_rewording_keeps_the_answer() -> None:
    rng = random.Random(5)
    for question in documents.document(rng, 40).questions:
        other = documents.reworded(question, rng)
        assert other.question != question.question
        assert (other.answer, other.needle) == (question.answer, question.needle)


def test_an_absent_question_is_not_answered_by_the_text() -> None:
    rng = random.Random(6)
    about = documents.document(rng, 80)
    stated = {question.question for question in about.questions}
    for _ in range(100):
        question = documents.absent(rng, about)
        assert question.question not in stated
        assert question.needle in question.answer == documents.ABSENT


def test_small_talk_is_answered_by_an_introduction() -> None:
    rng = random.Random(7)
    assert all(documents.small_talk(rng).answer == documents.INTRODUCTION for _ in range(50))


@pytest.mark.parametrize("length", LENGTHS)
def test_documents_keep_within_the_promised_length(tokenizer: Tokenizer, length: int) -> None:
    texts = [documents.document(random.Random(seed), documents.facts_within(length)).text for seed in range(20)]
    sizes = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    assert max(sizes) <= length
    assert min(sizes) >= 0.7 * length


def test_the_words_of_the_world_and_the_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    words = (*documents.NAMES, *documents.THINGS, *documents.FIRST_NAMES, *documents.LAST_NAMES, *documents.COLOURS)
    assert all(len(tokenizer.encode(f" {word}").ids) == 1 for word in words)
    assert len(tokenizer.encode(" 4821").ids) == len(tokenizer.encode("4821").ids) == 4


@pytest.mark.parametrize(
    "text",
    [
        "a\n\n\nb \n c\t\r\nd",
        "ναι, 日本語 🙂 don't  stop\n\n",
        documents.document(random.Random(8), 30).text,
    ],
)
def test_any_text_survives_and_may_be_cut_at_newlines(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    pieces = [piece + "\n" for piece in text.split("\n")]
    pieces[-1] = pieces[-1].removesuffix("\n")
    assert [i for piece in pieces for i in tokenizer.encode(piece).ids] == ids


def test_the_chat_template_takes_a_system_message_tools_and_several_turns() -> None:
    config = json.loads((weights() / "tokenizer_config.json").read_text())
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(config["chat_template"])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    ]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hello<|end|>"
        "<|assistant|>Yes.<|end|><|user|>Thanks<|end|><|assistant|>"
    )
    with_tools = template.render(messages=messages, tools=[{"name": "clock"}], add_generation_prompt=False)
    assert with_tools.startswith('<|bos|><|system|>Tools: [{"name": "clock"}]<|end|><|system|>')
