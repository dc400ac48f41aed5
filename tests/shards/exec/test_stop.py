from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shards.exec.stop import StopStrings


def a_tokenizer() -> Tokenizer:
    """One token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|tool|>", special=True)])
    return tokenizer


TOKENIZER = a_tokenizer()


def push(text: str, *stops: str) -> tuple[int, str] | None:
    """After how many tokens of `text` which stop string was found."""
    watch = StopStrings(TOKENIZER, stops)
    for count, token in enumerate(TOKENIZER.encode(text).ids, 1):
        found = watch.push(token)
        if found:
            return count, found
    return None


def test_a_stop_string_is_found_across_tokens():
    assert push("one two three", "two") == (7, "two")


def test_text_without_one_goes_on():
    assert push("one two three", "four", "threee") is None


def test_the_first_to_be_complete_is_reported():
    assert push("abcabd", "abd", "ca") == (4, "ca")


def test_characters_of_several_bytes_are_matched_when_whole():
    assert push("naïve ☃ snow", "☃") == (10, "☃")


def test_a_stop_string_that_is_a_special_token_is_found_by_its_id():
    assert push("yes<|end|>no", "<|end|>") == (4, "<|end|>")


@pytest.mark.parametrize("stop", ["Ã", "Ġ", "Ċ"])
def test_a_stop_string_that_is_the_vocabularys_name_of_a_byte_is_text(stop):
    assert push("naïve \n", stop) is None
    assert push(f"na {stop}", stop) == (3 + len(stop.encode()), stop)


def test_special_tokens_are_not_part_of_the_text():
    assert push("ab<|tool|>cd", "bc") == (4, "bc")


def test_what_was_passed_over_is_not_reported_later():
    watch = StopStrings(TOKENIZER, ["ab", "a very long stop string"])
    assert [watch.push(token) for token in TOKENIZER.encode("xabyyy").ids] == [None, None, "ab", None, None, None]


def test_a_decoder_that_takes_text_back_does_not_end_the_watch():
    tokenizer = Tokenizer(models.WordLevel({"A": 0, "B": 1, "C": 2, "D": 3}, unk_token="A"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("AB", "x")])
    watch = StopStrings(tokenizer, ["CD"])
    assert [watch.push(token) for token in (0, 1, 2, 3)] == [None, None, None, "CD"]


@pytest.mark.parametrize("seed", range(30))
def test_it_finds_what_a_search_of_the_whole_text_finds(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("abä") for _ in range(60))
    stops = ["".join(rng.choice("abä") for _ in range(rng.randint(2, 6))) for _ in range(3)]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    found = push(text, *stops)
    assert (found is None) == (not ends)
    if found:
        assert found[0] == len(text[: min(ends)].encode())
        assert text[: min(ends)].endswith(found[1])
