"""No text of a client becomes a token of the chat template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from router.ask import Chat
from router.text.chat_template import ChatTemplate
from router.text.inert import SEAM
from router.text.text_tokenizer import ChunkCache, TextTokenizer
from router.text.token_ids import unpack
from router.text.tokenize import How, ModelText
from tests.backends.parts import a_tokenizer
from tests.router.text.kinds import a_kind

MARKS = ("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<tool_call>", "<\uff5cUser\uff5c>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant"
)


def a_text() -> ModelText:
    tokenizer = Tokenizer.from_str(a_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken(mark, special=mark != "<tool_call>") for mark in MARKS])
    assets = {"tokenizer.json": tokenizer.to_str().encode(), "chat_template.jinja": TEMPLATE.encode()}
    return ModelText(assets, TextTokenizer(assets["tokenizer.json"], ChunkCache()), ChatTemplate(assets))


TEXT = a_text()


def a_sentencepiece(kind: str) -> TextTokenizer:
    tokenizer = Tokenizer.from_str(a_kind(kind).to_str())
    tokenizer.add_special_tokens(["</s>", "[INST]"])
    return TextTokenizer(tokenizer.to_str().encode(), ChunkCache())


OF_SENTENCEPIECE = {kind: a_sentencepiece(kind) for kind in ("llama 2", "gemma")}


def marks_in(chat: Chat, *, is_sent: bool = True) -> list[str]:
    numbers = {TEXT.tokenizer.id_of(mark): mark for mark in MARKS}
    ids = unpack(TEXT.tokens(chat, How(1, is_sent=is_sent)).token_ids)
    return [numbers[number] for number in ids if number in numbers]


def prompt_of(chat: Chat) -> str:
    return TEXT.tokenizer.decode(TEXT.tokens(chat, How(1)).token_ids)


fragments = st.sampled_from([*MARKS, "<|im_", "end|>", "<", ">", "[", "]", "a", " ", "\n", "\u00e9\U0001f600"])


@given(st.sampled_from(["user", "system", "tool"]), st.lists(fragments, max_size=12).map("".join))
def test_a_prompt_has_the_marks_of_its_template_alone_and_every_letter(role: str, content: str) -> None:
    chat = Chat([{"role": role, "content": content}])
    assert marks_in(chat) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert prompt_of(chat) == f"<|im_start|>{role}\n{content}<|im_end|>\n<|im_start|>assistant"


@pytest.mark.parametrize("length", [10, 5000])
def test_so_do_long_texts_that_are_tokenized_in_pieces(length: int) -> None:
    chat = Chat([{"role": "user", "content": ("many words <|im_end|> and\n" * length)}])
    assert marks_in(chat) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_what_the_assistant_wrote_keeps_its_marks() -> None:
    chat = Chat([{"role": "assistant", "content": "<tool_call>"}])
    assert "<tool_call>" in marks_in(chat)


def test_engines_that_read_texts_themselves_count_marks_as_they_do() -> None:
    assert len(marks_in(Chat([{"role": "user", "content": "<|im_end|>"}]), is_sent=False)) == 4


def test_a_clients_own_seam_is_replaced() -> None:
    assert SEAM not in prompt_of(Chat([{"role": "user", "content": f"<{SEAM}|im_end|>"}]))


@pytest.mark.parametrize("kind", ["llama 2", "gemma"])
@given(st.lists(st.sampled_from(["</s>", "[INST]", "a", " ", "the dog"]), max_size=8).map("".join))
def test_a_mark_that_is_text_has_no_space_within_where_tokenizers_begin_texts_with_one(kind: str, text: str) -> None:
    tokenizer = OF_SENTENCEPIECE[kind]
    ids = tokenizer.encode(tokenizer.inert.text(text))
    numbers = {tokenizer.id_of(mark) for mark in ("</s>", "[INST]")}
    assert numbers.isdisjoint(unpack(ids))
    assert tokenizer.decode(ids).strip() == text.strip()
