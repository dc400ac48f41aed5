from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Generator, Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from policies.errors import InvalidRequest
from router.ask import Ask, Chat, Input
from router.text.text_tokenizer import ChunkCache, TextTokenizer
from router.text.token_ids import pack, unpack
from router.text.tokenize import How, ModelText, Tokenizers, Tokens
from shards.kv.keys import block_keys
from tests.router.parts import MODEL, a_tokenizer, some_assets

lines = st.lists(st.text(alphabet="abc \n\tÄ九1.", max_size=60), max_size=40).map("\n".join)


def a_text_tokenizer(most_bytes: int = 10**6) -> TextTokenizer:
    return TextTokenizer(some_assets()["tokenizer.json"], ChunkCache(most_bytes))


def an_ask(*inputs: Chat | str | bytes) -> Ask:
    return Ask(MODEL, inputs, ({},) * len(inputs), "/")


@settings(deadline=None, max_examples=12)
@given(lines)
def test_ids_are_the_same_in_pieces_and_whole_cold_and_warm(text: str) -> None:
    tokenizer = a_text_tokenizer()
    assert tokenizer.places is not None
    text = (text + "\nend ") * (10_000 // (len(text) + 5) + 1)
    expected = pack(a_tokenizer().encode(text, add_special_tokens=False).ids)
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode(text) == expected
    assert unpack(tokenizer.with_ends(tokenizer.encode(text))).tolist() == a_tokenizer().encode(text).ids


def test_a_tokenizer_that_minds_cuts_is_given_whole_texts() -> None:
    minding = Tokenizer(models.WordLevel({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))
    minding.normalizer = normalizers.Prepend("x")
    minding.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = TextTokenizer(minding.to_str().encode(), ChunkCache())
    assert tokenizer.places is None
    text = "a\nb" * 5000
    assert unpack(tokenizer.encode(text)).tolist() == minding.encode(text).ids


def test_what_one_domain_has_sent_is_tokenized_again_for_another() -> None:
    class Counting(ChunkCache):
        hits = 0

        def get(self, owner: Hashable, text: str) -> bytes | None:
            found = super().get(owner, text)
            self.hits += found is not None
            return found

    cache = Counting()
    tokenizer = TextTokenizer(some_assets()["tokenizer.json"], cache)
    document = "".join(f"the {number}th quick brown fox\n" for number in range(2000))
    ids = tokenizer.encode(document, domain=1)
    assert cache.hits == 0
    assert tokenizer.encode(document, domain=2) == ids
    assert cache.hits == 0
    assert tokenizer.encode(document, domain=1) == ids
    assert cache.hits > 0


def test_the_cache_stays_within_its_bound_and_forgets_the_oldest() -> None:
    cache, rng = ChunkCache(10_000), random.Random(1)
    for number in range(500):
        cache.put(rng.randrange(2), f"{number} " * rng.randrange(100), b"\0" * rng.randrange(400))
        cache.check()
    cache.put(0, "last", b"1234")
    assert cache.get(0, "last") == b"1234"
    assert cache.get(1, "last") is None
    cache.put(0, "x" * 20_000, b"")
    cache.check()


async def test_a_prompt_becomes_ids_and_keys_with_specials_only_where_no_template_put_them() -> None:
    tokenizers = Tokenizers()
    text = await tokenizers.model(MODEL, some_assets())
    long = "word " * 500
    chat, plain, ids = await tokenizers.tokens(
        an_ask(Chat([{"role": "user", "content": long}]), long, pack([5, 6])), text, How(root=9), "acme"
    )
    assert unpack(plain.token_ids)[0] == 0
    assert unpack(chat.token_ids)[0] != 0
    assert unpack(ids.token_ids).tolist() == [5, 6]
    assert chat.keys == block_keys(chat.token_ids, 9)
    assert (plain.count, ids.keys) == (len(plain.token_ids) // 4, ())
    tokenizers.check()
    await tokenizers.close()


@pytest.mark.parametrize("given_", [b"", pack([400])])
async def test_prompts_without_tokens_or_with_unknown_ones_are_refused(given_: bytes) -> None:
    tokenizers = Tokenizers()
    text = await tokenizers.model(MODEL, some_assets())
    with pytest.raises(InvalidRequest):
        await tokenizers.tokens(an_ask(given_), text, How(root=0), "acme")
    await tokenizers.close()


async def test_a_tokenizer_is_loaded_once_and_again_when_its_files_change() -> None:
    tokenizers = Tokenizers()
    first, second = await asyncio.gather(*(tokenizers.model(MODEL, some_assets()) for _ in range(2)))
    assert first is second
    assert await tokenizers.model(MODEL, dict(some_assets())) is first
    changed = {**some_assets(), "chat_template.jinja": b"new"}
    assert (await tokenizers.model(MODEL, changed)).template is not first.template
    await tokenizers.close()


async def test_a_megabyte_is_tokenized_off_the_event_loop() -> None:
    threads = set[int]()

    class Seen(ModelText):
        def in_turns(self, given: Input, how: How) -> Generator[int, None, Tokens]:
            work = super().in_turns(given, how)
            while True:
                threads.add(threading.get_ident())
                try:
                    yield next(work)
                except StopIteration as done:
                    tokens: Tokens = done.value
                    return tokens

    tokenizers = Tokenizers()
    text = await tokenizers.model(MODEL, some_assets())
    words = "the quick brown fox jumps over the lazy dog\n" * 25_000
    seen = Seen(text.assets, text.tokenizer, text.template)
    (tokens,) = await tokenizers.tokens(an_ask(words), seen, How(root=1), "acme")
    assert tokens.count > 200_000
    assert threads
    assert threading.get_ident() not in threads, "the loop stood still"
    await tokenizers.close()
