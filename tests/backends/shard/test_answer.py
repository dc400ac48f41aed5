"""The text of an answer, from a shard's tokens: what stands before them, what ends them, and what is not shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from backends.detokenize import THOUGHT_MARKS, StopCutter
from backends.shard.answer import ShardAnswer
from backends.shard.inbox import News, Piece
from policies.nouns import Delta, Sampling
from router.protocols.openai.answers import chat_logprob
from shards.nouns import TokenLogprobs
from shards.wire.v1 import shard_pb2 as wire
from tests.backends.parts import a_tokenizer, ids_of

STOP, LENGTH = wire.Finished.STOP, wire.Finished.LENGTH


def a_llama_2() -> Tokenizer:
    """A tokenizer whose decoder drops the space that begins a text; it has bytes for what is no word."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Paris", "▁is", ",", "a", "▁", "</s>"]
    tokenizer = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # as some checkpoints have it: an end that is not special
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    return tokenizer


def an_answer(tokenizer: Tokenizer, sampling: Sampling = Sampling(), before: tuple[int, ...] = ()) -> ShardAnswer:  # noqa: B008
    return ShardAnswer(sampling, tokenizer, backend="b", prompt_tokens=3, before=before)


def answered(answer: ShardAnswer, ids: tuple[int, ...], end: wire.Finished | None = None, *, size: int = 1) -> str:
    """The text of `ids`, in pieces of `size` tokens, the last of which comes with `end`."""
    shown = ""
    for start in range(0, len(ids), size):
        is_last = start + size >= len(ids)
        piece = Piece(0, list(ids[start : start + size]), end=end if is_last else None)
        shown += "".join(delta.text for delta in answer.deltas(News(None, None, (piece,))))
        if answer.is_done:
            break
    return shown


words = st.text("ab", min_size=1, max_size=20)


@given(words, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 20), st.data())
def test_no_stop_string_counts_that_is_complete_before_the_minimum(
    text: str, stops: list[str], least: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(text)))
    ends = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > least
    ]
    expected = text[: min(ends)[1]] if ends else text
    answer = an_answer(a_tokenizer(), Sampling(stop=tuple(stops), min_new_tokens=least))
    assert answered(answer, ids_of(text), wire.Finished(reason=LENGTH), size=size) == expected


def test_a_stop_string_may_begin_before_the_minimum() -> None:
    cutter = StopCutter(["keeper", "ee"])
    assert cutter.push("the kee", may_stop=False) == "the "
    assert cutter.push("per") == ""
    assert cutter.found == "keeper"


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("by_token", "shown"),
    # a grammar may end an answer with a token that is text
    [(True, " Paris"), (False, " Paris</s>")],
)
def test_a_token_that_ends_an_answer_is_never_shown(by_token: bool, shown: str, size: int) -> None:
    tokenizer = a_llama_2()
    ids = (tokenizer.token_to_id("▁Paris"), tokenizer.token_to_id("</s>"))
    before = (tokenizer.token_to_id("▁is"),)
    end = wire.Finished(reason=STOP, by_token=by_token)
    assert answered(an_answer(tokenizer, before=before), ids, end, size=size) == shown


def test_a_text_goes_on_behind_its_prompt() -> None:
    tokenizer = a_llama_2()
    named = tokenizer.token_to_id
    ids, before = (named("▁Paris"), named(","), named("▁is")), (named("▁is"),)
    end = wire.Finished(reason=LENGTH)
    assert answered(an_answer(tokenizer, before=before), ids, end) == " Paris, is"
    stopped = an_answer(tokenizer, Sampling(stop=(" Paris",)), before)
    assert answered(stopped, ids, end) == ""
    assert stopped.is_done


def test_behind_half_a_character_a_text_begins_anew() -> None:
    answer = an_answer(a_tokenizer(), before=ids_of("é")[:1])
    assert answered(answer, ids_of("ab"), wire.Finished(reason=LENGTH)) == "ab"


@given(st.text(min_size=1, max_size=8))
def test_bytes_of_log_probabilities_join_to_the_bytes_of_the_text(text: str) -> None:
    tokenizer = a_tokenizer()
    assert octets_of(tokenizer, ids_of(text)) == text.encode()


def test_a_word_and_a_byte_have_their_own_bytes() -> None:
    tokenizer = a_llama_2()
    ids = [tokenizer.token_to_id(name) for name in ("▁Paris", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", ",")]
    assert octets_of(tokenizer, tuple(ids)) == " Paris\U0001f600,".encode()


def octets_of(tokenizer: Tokenizer, ids: tuple[int, ...]) -> bytes:
    answer = an_answer(tokenizer, Sampling(top_logprobs=1))
    found: list[Delta] = []
    for number in ids:
        piece = Piece(0, [number], [TokenLogprobs(-0.5, ((number, -0.5),))])
        found += answer.deltas(News(None, None, (piece,)))
    entries = [chat_logprob(drawn) for delta in found for drawn in delta.logprobs]
    assert all(entry["bytes"] == entry["top_logprobs"][0]["bytes"] for entry in entries)
    return bytes(octet for entry in entries for octet in entry["bytes"])


@pytest.mark.parametrize("mark", [mark for pair in THOUGHT_MARKS for mark in pair])
@pytest.mark.parametrize("is_chat", [True, False])
def test_marks_of_reasoning_are_text_in_chats_also_where_they_are_special_tokens(mark: str, is_chat: bool) -> None:
    tokenizer = a_llama_2()
    tokenizer.add_special_tokens([AddedToken(mark, special=True)])
    ids = (tokenizer.token_to_id(mark), tokenizer.token_to_id("a"))
    answer = ShardAnswer(Sampling(), tokenizer, backend="b", prompt_tokens=3, is_chat=is_chat)
    assert answered(answer, ids, wire.Finished(reason=LENGTH)) == (f"{mark}a" if is_chat else "a")


@pytest.mark.parametrize("size", [1, 2, 9])
def test_what_ends_an_answer_is_shown_to_clients_that_want_it(size: int) -> None:
    tokenizer = a_llama_2()
    named, before = tokenizer.token_to_id, (tokenizer.token_to_id("▁is"),)
    by_text = an_answer(tokenizer, Sampling(stop=(",",), shows_stop=True), before)
    assert answered(by_text, (named("▁Paris"), named(","), named("▁is")), size=size) == " Paris,"
    by_token = an_answer(tokenizer, Sampling(shows_stop=True), before)
    end = wire.Finished(reason=STOP, by_token=True)
    assert answered(by_token, (named("▁Paris"), named("</s>")), end, size=size) == " Paris</s>"
