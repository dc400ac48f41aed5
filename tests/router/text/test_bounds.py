"""However long a prompt is, little of it is tokenized, it delays no other, and it takes little memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Hashable
from typing import Any

import pytest

from router.ask import Ask, Chat, Reading
from router.text.cuts import UncuttableError
from router.text.text_tokenizer import BATCH_CHARACTERS, ChunkCache, TooManyTokensError
from router.text.token_ids import count, pack
from router.text.tokenize import INLINE_CHARACTERS, How, ModelText, Tokenizers, size_of
from tests.router.parts import MODEL, TEMPLATE, a_tokenizer, some_assets
from tests.router.text.kinds import a_kind

SENTENCE = "the lazy dog "
LONG = SENTENCE * 100_000


class Read(ChunkCache):
    """Counts the characters that were tokenized: each piece is looked up."""

    characters = 0

    def get(self, owner: Hashable, text: str) -> bytes | None:
        self.characters += len(text)
        return super().get(owner, text)


def an_ask(*inputs: Chat | str | bytes) -> Ask:
    return Ask(MODEL, inputs, ({},) * len(inputs), "/")


def a_chat(text: str, **message: Any) -> Chat:
    return Chat([{"role": "user", "content": text, **message}])


async def a_text(tokenizers: Tokenizers, kind: str = "tests") -> ModelText:
    tokenizers.cache = Read()
    template = TEMPLATE.replace("message.content }}", "message.content }}{{ message.extra }}")
    files = {"tokenizer.json": a_kind(kind).to_str().encode(), "chat_template.jinja": template.encode()}
    return await tokenizers.model(MODEL, {**some_assets(), **files})


@pytest.mark.parametrize("kind", ["tests", "qwen", "llama 2"])
@pytest.mark.parametrize("given", [LONG, a_chat(LONG), a_chat("hello", extra=LONG)], ids=["text", "chat", "extra"])
async def test_of_a_prompt_beyond_the_context_no_more_is_tokenized_than_fits(kind: str, given: Chat | str) -> None:
    tokenizers = Tokenizers()
    text = await a_text(tokenizers, kind)
    with pytest.raises(TooManyTokensError, match="at least") as refused:
        await tokenizers.tokens(an_ask(given), text, How(1, most_tokens=1000), "acme")
    assert refused.value.least > 1000
    assert isinstance(tokenizers.cache, Read)
    assert tokenizers.cache.characters < 2 * BATCH_CHARACTERS + 1000 * 20
    tokenizers.check()
    await tokenizers.close()


async def test_what_surely_does_not_fit_is_not_tokenized_at_all() -> None:
    tokenizers = Tokenizers()
    text = await a_text(tokenizers)
    assert text.tokenizer.most_characters == 6
    for given in (LONG, a_chat(LONG)):
        with pytest.raises(TooManyTokensError):
            await tokenizers.tokens(an_ask(given), text, How(1, most_tokens=1000), "acme")
    assert isinstance(tokenizers.cache, Read)
    assert tokenizers.cache.characters == 0
    await tokenizers.close()


@pytest.mark.parametrize("words", [10, 5_000])
async def test_a_prompt_that_just_fits_is_read_and_one_more_token_is_refused_with_the_exact_count(words: int) -> None:
    tokenizers = Tokenizers()
    text = await a_text(tokenizers)
    prompt = SENTENCE * words
    for given, ids in (
        (prompt, a_tokenizer().encode(prompt).ids),
        (pack([5] * words), [5] * words),
        (a_chat(prompt), a_tokenizer().encode(f"<|user|>{prompt}\n<|assistant|>", add_special_tokens=False).ids),
    ):
        (fits,) = await tokenizers.tokens(an_ask(given), text, How(1, most_tokens=len(ids)), "acme")
        assert fits.token_ids == pack(ids)
        with pytest.raises(TooManyTokensError) as refused:
            await tokenizers.tokens(an_ask(given), text, How(1, most_tokens=len(ids) - 1), "acme")
        assert refused.value.least <= len(ids)
        assert refused.value.least == len(ids) or not refused.value.is_exact
    await tokenizers.close()


async def test_prompts_without_a_bound_are_read_whole() -> None:
    tokenizers = Tokenizers()
    text = await a_text(tokenizers)
    (whole,) = await tokenizers.tokens(an_ask(LONG), text, How(1), "acme")
    (cut,) = await tokenizers.tokens(an_ask(LONG), text, How(1, reading=Reading(most_tokens=100)), "acme")
    assert count(whole.token_ids) == len(a_tokenizer().encode(LONG).ids)
    assert cut.token_ids[-100:] == whole.token_ids[-100:]
    await tokenizers.close()


async def test_a_long_text_that_cannot_be_cut_is_not_tokenized() -> None:
    tokenizers = Tokenizers()
    text = await a_text(tokenizers, "llama 2")
    with pytest.raises(UncuttableError):
        await tokenizers.tokens(an_ask(LONG), text, How(1), "acme")
    await tokenizers.close()


@pytest.mark.parametrize(
    "chat",
    [
        a_chat("hello", tool_calls=[{"function": {"name": "f", "arguments": {"text": LONG}}}]),
        a_chat("hello", reasoning=LONG),
        Chat([{"role": "user", "content": "hello"}], [{"type": "function", "function": {"parameters": {LONG: 1}}}]),
        Chat([{"role": "user", "content": "hello"}], variables={"documents": [{"text": LONG}]}),
        Chat([{"role": "user", "content": ""}] * 30_000),
    ],
    ids=["calls", "reasoning", "tools", "documents", "messages"],
)
def test_all_that_a_template_may_show_counts_as_the_size_of_a_chat(chat: Chat) -> None:
    assert size_of(chat) > 1_000_000
    assert INLINE_CHARACTERS < size_of(chat, INLINE_CHARACTERS) <= size_of(chat)


async def test_a_short_prompt_does_not_wait_for_the_long_ones_of_others() -> None:
    tokenizers = Tokenizers(threads=1)
    text = await a_text(tokenizers)
    ended: list[str] = []

    async def read(tenant: str, given: str) -> None:
        await tokenizers.tokens(an_ask(given), text, How(1), tenant)
        ended.append(tenant)

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(read("busy", f"{number} {LONG}"))
        await asyncio.sleep(0)
        group.create_task(read("other", SENTENCE * 100))
    assert ended[0] == "other"
    tokenizers.check()
    await tokenizers.close()


MEMORY = """
import asyncio, resource
from router.text.tokenize import How, Tokenizers
from tests.router.text.test_bounds import a_text, an_ask

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

async def main():
    tokenizers = Tokenizers()
    text = await a_text(tokenizers)
    before = peak()
    (tokens,) = await tokenizers.tokens(an_ask("x y " * 1_000_000), text, How(1), "acme")
    print(tokens.count, peak() - before)

asyncio.run(main())
"""


def test_memory_is_that_of_the_text_and_its_ids_and_not_of_the_librarys_records() -> None:
    """Tokenized in one piece, this text of 4 MB took about 1 GB."""
    ran = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=120)
    tokens, mebibytes = map(int, ran.stdout.split())
    assert tokens > 2_000_000
    assert mebibytes < 200
