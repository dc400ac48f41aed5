"""A tokenizer's files as transformers reads them: special tokens at the ends of texts, and tokens that are added."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router.ask import Chat, Reading
from router.text import text_tokenizer
from router.text.text_tokenizer import ChunkCache, TextTokenizer
from router.text.token_ids import pack, unpack
from router.text.tokenize import How, ModelText, Tokenizers, shortened
from router.text.turns import at_once
from shards.kv.keys import TOKEN_BYTES
from tests.router.parts import MODEL, a_tokenizer, some_assets
from tests.router.text.kinds import a_kind

TEXTS = ("the lazy dog", "<s>the dog", "<new> fox<new>", "über 九\n\n x", "")


@pytest.mark.torch
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "bos_token": None},
        {"added_tokens_decoder": {"400": {"content": "<new>", "special": True, "lstrip": True}}},
    ],
)
def test_texts_get_the_ids_that_transformers_gives_them(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    configured = {"bos_token": "<s>", "eos_token": "dog", "tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (tmp_path / "tokenizer.json").write_text(a_tokenizer().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configured))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = TextTokenizer(a_tokenizer().to_str().encode(), ChunkCache(), 0, configured)
    for text in TEXTS:
        assert unpack(ours.encode(text)).tolist() == theirs.encode(text, add_special_tokens=False), text
        assert unpack(ours.with_ends(ours.encode(text))).tolist() == theirs.encode(text), text


async def test_ends_are_added_to_texts_and_not_to_conversations_unless_asked_for() -> None:
    text = await a_text()
    chat, how = Chat([{"role": "user", "content": "the dog"}]), How(root=1)
    for given, adds, has in (
        ("the dog", None, True),
        ("the dog", False, False),
        (chat, None, False),
        (chat, True, True),
    ):
        tokens = text.tokens(given, How(root=1, reading=Reading(adds_special=adds)))
        assert (unpack(tokens.token_ids)[0] == 0) is has, given
    assert text.tokens(pack([5, 6]), how).token_ids == pack([5, 6])


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (Reading(most_tokens=3), [3, 4, 5]),
        (Reading(most_tokens=3, keeps_start=False), [3, 4, 5]),
        (Reading(most_tokens=3, keeps_start=True), [1, 2, 3]),
        (Reading(most_tokens=9), [1, 2, 3, 4, 5]),
        (Reading(), [1, 2, 3, 4, 5]),
    ],
)
def test_prompts_are_cut_at_the_side_that_is_asked_for(reading: Reading, expected: list[int]) -> None:
    assert unpack(shortened(pack([1, 2, 3, 4, 5]), reading)).tolist() == expected


async def test_a_text_that_is_cut_keeps_its_special_tokens_unless_a_side_is_named() -> None:
    text = await a_text()
    whole = unpack(text.tokens("the lazy dog jumps", How(root=1)).token_ids).tolist()
    for keeps_start, expected in ((None, [0, *whole[-2:]]), (False, whole[-3:]), (True, whole[:3])):
        how = How(root=1, reading=Reading(most_tokens=3, keeps_start=keeps_start))
        assert unpack(text.tokens("the lazy dog jumps", how).token_ids).tolist() == expected


async def test_tools_that_must_not_be_called_are_seen_where_engines_show_them() -> None:
    text = await a_text()
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "user", "content": "the dog"}]
    hidden, plain, shown = (
        text.tokens(
            Chat(messages, tools, bars_tools=bars), How(root=1, is_sent=not shows, shows_barred_tools=shows)
        ).count
        for tools, bars, shows in (([tool], True, False), (None, False, False), ([tool], True, True))
    )
    assert hidden == plain < shown


async def a_text() -> ModelText:
    tokenizers = Tokenizers()
    text = await tokenizers.model(MODEL, some_assets())
    await tokenizers.close()
    return text


@pytest.mark.parametrize("kind", ["tests", "qwen", "llama 2"])
def test_a_text_is_the_same_decoded_in_slices_or_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer(a_kind(kind).to_str().encode(), ChunkCache())
    texts = ["the lazy dog jumps. " * 30, "\u4e5d\u5341\U0001f600 \u00e4" * 40, " two  spaces\n\n" * 30, ""]
    for text in texts:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        for slice_tokens in (8, 9, 11, 64):
            with monkeypatch.context() as patch:
                patch.setattr(text_tokenizer, "DECODED_TOKENS", slice_tokens)
                assert tokenizer.decode(ids) == whole


def test_ids_that_never_end_a_character_are_decoded_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokenizer, "DECODED_TOKENS", 50)
    tokenizer = TextTokenizer(a_kind("qwen").to_str().encode(), ChunkCache())
    half = tokenizer.encode("\u2603")[:TOKEN_BYTES]
    assert set(tokenizer.decode(half * 1000)) == {"\ufffd"}


DOCUMENTS = [
    "Document a\nthe lazy dog 3,000.\n\n",
    "Document \u4e5d: x\n\n  a.b \n\n\n",
    "Document c\n\U0001f600\nDocument d\n",
]


@pytest.mark.parametrize("kind", ["tests", "qwen", "bundled", "o200k"])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_documents_that_are_tokenized_apart_have_the_tokens_of_the_whole(kind: str, order: tuple[int, ...]) -> None:
    tokenizer = TextTokenizer(a_kind(kind).to_str().encode(), ChunkCache())
    start = "the fox:\n\n"
    found = at_once(tokenizer.apart_in_turns([start, *DOCUMENTS], "Document "))
    assert found is not None
    first, *each = found
    whole = at_once(tokenizer.in_turns([start, *(DOCUMENTS[place] for place in order)], starts="Document "))
    assert first + b"".join(each[place] for place in order) == whole
    text = start + "".join(DOCUMENTS[place] for place in order)
    assert whole == pack(a_kind(kind).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["gemma", "llama 2", "over words"])
def test_a_tokenizer_without_a_boundary_in_front_of_them_tokenizes_none_apart(kind: str) -> None:
    tokenizer = TextTokenizer(a_kind(kind).to_str().encode(), ChunkCache())
    assert at_once(tokenizer.apart_in_turns(["the fox:\n\n", *DOCUMENTS], "Document ")) is None


def test_a_document_is_tokenized_once_wherever_it_stands() -> None:
    cache = ChunkCache()
    tokenizer = TextTokenizer(a_tokenizer().to_str().encode(), cache)
    at_once(tokenizer.apart_in_turns(["the fox:\n\n", *DOCUMENTS], "Document "))
    before = cache.bytes
    for order in itertools.permutations(DOCUMENTS):
        at_once(tokenizer.in_turns(["the fox:\n\n", *order, "Which?"], starts="Document "))
    # what differs is the question, which is never kept, and the document in front of it
    assert cache.bytes == before


async def test_what_stands_before_the_documents_is_read_as_the_template_shows_it() -> None:
    text = await a_text()
    chat = Chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "@@Which?"}], starts="Document "
    )
    found = at_once(text.apart_in_turns(chat, How(root=1), "@@", ["Read:\n\n", *DOCUMENTS]))
    assert found is not None
    whole = replace(chat, messages=[chat.messages[0], {"role": "user", "content": "Read:\n\n" + "".join(DOCUMENTS)}])
    ids = text.tokens(whole, How(root=1)).token_ids
    assert ids.startswith(b"".join(found))
    assert at_once(text.apart_in_turns(chat, How(root=1), "elsewhere", DOCUMENTS)) is None
    adds = How(root=1, reading=Reading(adds_special=True))
    assert at_once(text.apart_in_turns(chat, adds, "@@", DOCUMENTS)) is None
