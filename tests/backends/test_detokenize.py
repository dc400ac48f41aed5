from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from backends.detokenize import StopCutter, TokenText, marks_of
from tests.backends.parts import END, a_tokenizer, ids_of


def pieces_of(length: int, cuts: list[int]) -> list[slice]:
    places = sorted({0, length, *(cut % (length + 1) for cut in cuts)})
    return [slice(start, end) for start, end in pairwise(places)]


@given(st.lists(st.integers(0, 256)), st.lists(st.integers(0, 1000)))
def test_increments_join_to_the_text_of_decoding_all_at_once(ids: list[int], cuts: list[int]) -> None:
    text = TokenText(a_tokenizer())
    joined = "".join(text.push(ids[piece]) for piece in pieces_of(len(ids), cuts)) + text.flush()
    assert joined == a_tokenizer().decode(ids)


@given(st.text())
def test_no_increment_has_half_a_character(spoken: str) -> None:
    text = TokenText(a_tokenizer())
    increments = [text.push((token,)) for token in ids_of(spoken)]
    assert all("\ufffd" not in increment for increment in increments) or "\ufffd" in spoken
    assert "".join(increments) + text.flush() == a_tokenizer().decode(ids_of(spoken))


def test_special_tokens_have_no_text() -> None:
    text = TokenText(a_tokenizer())
    assert text.push(ids_of("a")) + text.push(ids_of(END)) + text.flush() == "a"


def test_half_a_character_at_the_end_is_replaced() -> None:
    text = TokenText(a_tokenizer())
    assert text.push(ids_of("é")[:1]) == ""
    assert text.flush() == "\ufffd"
    assert text.flush() == ""


@given(st.lists(st.integers(0, 260)))
def test_bytes_that_are_no_text_never_raise(ids: list[int]) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hi": 256, "▁": 257, "a": 258, "é": 259, "?": 260}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="?"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = TokenText(tokenizer)
    joined = "".join(text.push((token,)) for token in ids) + text.flush()
    assert bool(joined.strip()) == bool(tokenizer.decode(ids).strip())


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "found"),
    [
        (["one two three"], ["two"], "one ", "two"),
        (["one t", "w", "o three"], ["two"], "one ", "two"),
        (["one t", "w", "enty"], ["two"], "one twenty", None),
        (["aab"], ["ab"], "a", "ab"),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["abc"], ["abc", "b"], "a", "b"),
        (["ab"], ["b", "ab"], "", "ab"),
        (["text"], [""], "text", None),
        (["text t"], ["tz"], "text t", None),
    ],
)
def test_text_ends_where_a_stop_string_begins(
    pieces: list[str], stops: list[str], shown: str, found: str | None
) -> None:
    cutter = StopCutter(stops)
    assert "".join(cutter.push(piece) for piece in pieces) + cutter.flush() == shown
    assert cutter.found == found


words = st.text("ab", max_size=30)
stop_words = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(words, stop_words, st.lists(st.integers(0, 1000)))
def test_how_text_is_cut_into_pieces_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    whole, pieced = StopCutter(stops), StopCutter(stops)
    shown = "".join(pieced.push(text[piece]) for piece in pieces_of(len(text), cuts)) + pieced.flush()
    assert shown == whole.push(text) + whole.flush()
    assert pieced.found == whole.found


@given(words, stop_words, st.lists(st.integers(0, 1000)))
def test_no_part_of_a_stop_string_is_ever_shown(text: str, stops: list[str], cuts: list[int]) -> None:
    cutter, shown = StopCutter(stops), ""
    for piece in pieces_of(len(text), cuts):
        shown += cutter.push(text[piece])
        assert not any(stop in shown for stop in stops)
        if cutter.found is None:
            rest = text[len(shown) : piece.stop]
            assert rest == "" or any(stop.startswith(rest) for stop in stops)
    if cutter.found is not None:
        assert text.startswith(shown + cutter.found)
    else:
        assert shown + cutter.flush() == text


def with_marks() -> Tokenizer:
    tokenizer = Tokenizer.from_str(a_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    return tokenizer


@given(st.lists(st.sampled_from(["Grüße", "[TOOL_CALLS]", END, "😀"]), max_size=6), st.lists(st.integers(0, 100)))
def test_special_tokens_around_tool_calls_are_text_for_the_tool_call_reader(
    written: list[str], cuts: list[int]
) -> None:
    tokenizer = with_marks()
    ids = [number for piece in written for number in tokenizer.encode(piece).ids]
    plain, shown = TokenText(tokenizer), TokenText(tokenizer, marks_of(tokenizer, has_tools=True))
    pieces = [ids[piece] for piece in pieces_of(len(ids), cuts)]
    seen = "".join(map(shown.push, pieces)) + shown.flush()
    assert seen == "".join(written).replace(END, "")
    assert "[TOOL_CALLS]" not in "".join(map(plain.push, pieces)) + plain.flush()


def test_special_tokens_around_channels_are_text_where_the_model_has_them() -> None:
    tokenizer = Tokenizer.from_str(a_tokenizer().to_str())
    assert marks_of(tokenizer, has_tools=False) == {}
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    assert set(marks_of(tokenizer, has_tools=False).values()) == set(marks)
    written = "<|channel|>final<|message|>Grüße<|end|>"
    text = TokenText(tokenizer, marks_of(tokenizer, has_tools=False))
    assert text.push(tokenizer.encode(written, add_special_tokens=False).ids) + text.flush() == written


@given(
    st.lists(st.text("ab", max_size=9), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=3),
)
def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else(pieces: list[str], stops: list[str]) -> None:
    cutter, text, passed = StopCutter(stops), "", ""
    for piece in pieces:
        text += piece
        passed += cutter.push(piece)
        if cutter.found is not None:
            break
        held = max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))
        assert passed == text[: len(text) - held]
    places = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    assert cutter.found == (min(places)[2] if places else None)
