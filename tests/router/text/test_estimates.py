"""Prompts without a tokenizer: their measures, their keys, and estimates of their length."""

from __future__ import annotations

import msgspec
import pytest

from policies.learning.text_length import MEDIA_TOKENS, TextLength, measured
from policies.nouns import Capability
from policies.prefix.text_keys import CHUNK_BYTES
from router.ask import Ask, Chat, Input, Reading
from router.text.estimates import estimated
from router.text.token_ids import pack
from router.text.tokenize import Tokens
from tests.router.parts import MODEL

TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds what is asked for in a long list."}}]


def tokens_of(given: Input, needs: frozenset[Capability] = frozenset(), length: TextLength | None = None) -> Tokens:
    (tokens,) = estimated(Ask(MODEL, (given,), ({},), "/", needs=needs), 7, length or TextLength())
    return tokens


def a_chat(text: str, *, role: str = "user", media: int = 0, **more: object) -> Chat:
    return Chat([{"role": role, "content": text, **more}], media=media)


def test_a_text_gets_an_estimate_with_an_interval_and_a_lower_bound() -> None:
    tokens = tokens_of(" document" * 1500)
    assert tokens.least is not None
    assert tokens.likely is not None
    assert tokens.least < 1504 <= tokens.likely[1]
    assert tokens.likely[0] <= tokens.count <= tokens.likely[1]
    assert not tokens.token_ids


def test_token_ids_are_counted() -> None:
    tokens = tokens_of(pack([1, 2, 3]))
    assert (tokens.count, tokens.least, tokens.likely, tokens.measured) == (3, None, None, None)


def test_many_lists_of_token_ids_for_embeddings_are_no_exact_length() -> None:
    assert tokens_of(pack([1, 2, 3]), frozenset({Capability.EMBEDDINGS})).least == 1


@pytest.mark.parametrize(
    "longer",
    [
        a_chat("hello", tool_calls=[{"function": {"name": "find", "arguments": {"what": "x" * 400}}}]),
        Chat(a_chat("hello").messages, tools=TOOLS),
        Chat([*a_chat("be brief", role="system").messages, *a_chat("hello").messages]),
    ],
)
def test_all_that_a_template_prints_adds_to_the_length(longer: Chat) -> None:
    assert tokens_of(longer).count > tokens_of(a_chat("hello")).count


def test_tools_count_by_their_number_and_by_the_bytes_of_their_descriptions() -> None:
    alone, one = tokens_of(a_chat("hello")).measured, tokens_of(Chat(a_chat("hello").messages, tools=TOOLS)).measured
    assert alone is not None
    assert one is not None
    expected = measured(["hello"], is_chat=True, tools=len(TOOLS), tool_bytes=len(msgspec.json.encode(TOOLS)))
    assert list(one.parts) == list(expected.parts)
    assert list(alone.parts) == list(measured(["hello"], is_chat=True).parts)


def test_an_image_counts_as_many_tokens_and_is_not_learnt_from() -> None:
    chat = a_chat("look", media=1)
    tokens = tokens_of(chat)
    assert tokens.count == tokens_of(a_chat("look")).count + MEDIA_TOKENS
    assert tokens.least == 1
    assert tokens.measured is not None
    assert tokens.measured.media == 1


def test_what_was_learnt_of_a_model_is_used() -> None:
    length, text = TextLength(), "今天我们讨论新的系统。" * 40
    for _ in range(10):
        measured = tokens_of(text).measured
        assert measured is not None
        length.learn(measured, 3 * len(text))
    assert tokens_of(text, length=length).count == pytest.approx(3 * len(text), rel=0.02)


@pytest.mark.parametrize("tokens_each", [0.25, 0.5, 1.0, 3.0])
def test_a_key_stands_for_as_many_tokens_as_the_model_makes_of_its_text(tokens_each: float) -> None:
    length, text = TextLength(), "A byte is a token, or a word is. " * 40
    for _ in range(20):
        measured = tokens_of(text).measured
        assert measured is not None
        length.learn(measured, round(tokens_each * len(text)))
    tokens = tokens_of(text, length=length)
    assert tokens.key_tokens == pytest.approx(tokens_each * CHUNK_BYTES, rel=0.05)
    assert len(tokens.keys) * tokens.key_tokens <= tokens.count


def test_lone_surrogates_have_keys_like_other_text() -> None:
    assert len(tokens_of("\ud800" * 86).keys) == 1


def a_chat_about(image: str, question: str, *, images: int = 1) -> Chat:
    return a_chat(f"\x1dimage_url {image}\x1d" * images + question, media=images)


def test_two_short_questions_about_one_image_share_keys_and_those_about_another_share_none() -> None:
    asked = (a_chat_about("aa", "What is it?"), a_chat_about("aa", "Whose is it?"), a_chat_about("bb", "What is it?"))
    first, second, other = (tokens_of(chat).keys for chat in asked)
    assert len(first) >= 15
    assert first[:15] == second[:15]
    assert not set(first) & set(other)


def test_the_keys_of_a_prompt_with_very_many_images_stay_bounded() -> None:
    assert len(tokens_of(a_chat_about("aa", "What are they?", images=5000)).keys) < 2 * 16 * 64 + 5000


def test_what_the_engine_cuts_is_no_longer_than_that_and_nothing_is_learnt_of_it() -> None:
    def cut_to(most: int) -> Tokens:
        ask = Ask(MODEL, (" word" * 900,), ({},), "/", reading=Reading(most_tokens=most))
        (tokens,) = estimated(ask, 7, TextLength())
        return tokens

    assert (cut_to(50).count, cut_to(50).likely, cut_to(50).least) == (50, (50, 50), 1)
    assert cut_to(-1).count > 500
    assert (cut_to(-1).least, cut_to(-1).measured) == (1, None)
