"""No token stands for more characters than is said, and nothing is said where that is not certain."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.token_ids import count
from tests.router.text.kinds import KINDS, read

CERTAIN = {"bundled", "tests", "gpt-4", "o200k", "over words", "odd tokens", "llama 2", "gemma"}
parts = st.one_of(
    st.characters(exclude_categories=["Cs"]), st.sampled_from(["the lazy dog", "<|start|>", "   ", "\n\n"])
)


@pytest.mark.parametrize("name", sorted(CERTAIN))
@settings(deadline=None, max_examples=60)
@given(st.lists(parts, max_size=40).map("".join))
@example("<|start|>" * 9)
@example(" " * 2000)
@example("\u0301" * 50 + "九" * 50)
def test_a_text_has_a_token_for_so_many_characters_at_least(name: str, text: str) -> None:
    reader = read(name)
    assert reader.most_characters is not None
    assert count(reader.encode(text)) * reader.most_characters >= len(text)


@pytest.mark.parametrize("name", sorted(KINDS.keys() - CERTAIN))
def test_nothing_is_said_of_tokenizers_that_shorten_texts(name: str) -> None:
    """They compose characters, take white space, or make one token of an unknown word."""
    assert read(name).most_characters is None
