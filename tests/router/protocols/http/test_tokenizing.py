"""`/tokenize` and `/detokenize`: vLLM's shapes, from the tokenizer that is here or from a backend that has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from backends.base import Tokenized
from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from policies.nouns import Limits
from policies.rules import Range, Rule, When
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from router.protocols.http import tokenizing
from router.text import text_tokenizer
from router.text.chat_template import ChatTemplate
from router.text.text_tokenizer import ChunkCache, TextTokenizer
from router.text.tokenize import ModelText
from tests.router.parts import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Client,
    ScriptedBackend,
    a_chat,
    a_client,
    a_config,
    a_router,
    a_tenant,
    a_tokenizer,
    some_assets,
)
from tests.router.text.test_checkpoint import a_checkpoint


@dataclass
class Engine(ScriptedBackend):
    """A backend that makes one token of each character."""

    speaks_tokens: bool = False
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    failure: ExpectedError | None = None
    can_tell: bool = True

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:
        self.asked.append(body)
        if self.failure is not None:
            raise self.failure
        text = body["prompt"] if "prompt" in body else "".join(str(message["content"]) for message in body["messages"])
        return Tokenized([ord(letter) for letter in text], list(text)) if self.can_tell else None

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:
        return "".join(map(chr, token_ids)) if self.can_tell else None


def with_pool(tokenizer: str | None = None, **more: Any) -> Config:
    return replace(a_config(), pools={"own": PoolSpec("own", kind="vllm", model=MODEL, tokenizer=tokenizer)}, **more)


def by_length() -> Config:
    """A config with rules about lengths, so that lengths have to be exact."""
    return with_pool(rules=(Rule("batch", When(prompt_tokens=(Range(100, None),))), Rule("chat")))


async def test_a_text_and_a_conversation_are_tokenized_by_the_tokenizer_that_is_here() -> None:
    words = a_tokenizer().encode("the lazy dog")
    async with a_router() as router, a_client(router) as client:
        body = {"model": MODEL, "prompt": "the lazy dog", "return_token_strs": True}
        assert await client.answer("/tokenize", body) == (
            200,
            {"count": len(words.ids), "max_model_len": 4096, "tokens": words.ids, "token_strs": words.tokens},
        )
        plain = {"prompt": "the lazy dog", "add_special_tokens": False}
        assert (await client.answer("/tokenize", plain))[1]["tokens"] == words.ids[1:]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "the"}], "add_generation_prompt": False}
        _, reply = await client.answer("/tokenize", chat)
        assert (a_tokenizer().decode(reply["tokens"]), reply["token_strs"]) == ("<|user|>the\n", None)
        assert (await client.answer("/tokenize", {"prompt": ""}))[1]["tokens"] == [0]
        assert await client.answer("/detokenize", {"model": MODEL, "tokens": words.ids}) == (
            200,
            {"prompt": "<s>the lazy dog"},
        )
        assert await client.answer("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


async def test_without_a_tokenizer_a_backend_is_asked() -> None:
    engine = Engine()
    async with a_router(engine, config=with_pool()) as router, a_client(router) as client:
        body = {"prompt": "abc", "return_token_strs": True}
        _, reply = await client.answer("/tokenize", body)
        assert (reply["tokens"], reply["token_strs"]) == ([97, 98, 99], ["a", "b", "c"])
        assert (await client.answer("/tokenize", {"prompt": ""}))[1]["count"] == 0
        assert await client.answer("/detokenize", {"tokens": [97, 98]}) == (200, {"prompt": "ab"})
        counted = {"model": MODEL, "messages": [{"role": "user", "content": "abcd"}]}
        assert await client.answer("/v1/messages/count_tokens", counted) == (200, {"input_tokens": 4})


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/tokenize", {"model": MODEL}, 400, "send either"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "messages": []}, 400, "send either"),
        ("/tokenize", {"model": MODEL, "prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"model": "none", "prompt": "a"}, 404, "there is no model"),
        ("/detokenize", {"model": MODEL}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [2**32]}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_read_is_refused_with_a_hint(
    path: str, body: dict[str, Any], status: int, says: str
) -> None:
    async with a_router() as router, a_client(router) as client:
        found, reply = await client.answer(path, body)
        assert (found, says in reply["error"]["message"]) == (status, True), reply
        assert (await client.answer(path, body, key="wrong"))[0] == 401


@pytest.mark.parametrize(
    ("engine", "status", "says"),
    [
        (ScriptedBackend(speaks_tokens=False), 400, "operators can give its pool a `tokenizer`"),
        (Engine(can_tell=False), 400, "operators can give its pool a `tokenizer`"),
        (Engine(failure=InvalidRequest("the template objects")), 400, "the template objects"),
        (Engine(failure=BackendFailed("it is away")), 502, "the backend that had the request failed"),
    ],
)
async def test_if_no_backend_tokenizes_the_client_gets_the_reason(
    engine: ScriptedBackend, status: int, says: str
) -> None:
    async with a_router(engine, config=with_pool()) as router, a_client(router) as client:
        found, reply = await client.answer("/tokenize", {"prompt": "abc"})
    assert (found, says in str(reply)) == (status, True), reply


async def test_an_engine_is_asked_where_rules_look_at_lengths_and_once_for_each_prompt() -> None:
    engine = Engine()
    async with a_router(engine, config=by_length()) as router, a_client(router) as client:
        for _ in range(2):
            assert (await client.answer(CHAT, a_chat("x" * 150)))[0] == 200
        assert (await client.answer(CHAT, a_chat("é")))[0] == 200
        assert router.gateway.sources.origins() == {MODEL: "its engine, which is asked for each prompt"}
    assert [(request.prompt_tokens, request.service_class) for request in engine.requests] == [
        (150, "batch"),
        (150, "batch"),
        (1, "chat"),
    ]
    assert len(engine.requests[0].block_keys) == 2
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    ("config", "is_asked"),
    [
        (with_pool(), False),
        (by_length(), True),
        (with_pool(rules=(Rule("batch", When(uncached_tokens=(Range(100, None),))), Rule("chat"))), True),
        (replace(a_config(a_tenant(limits=Limits(tokens_per_minute=10**6))), pools=with_pool().pools), True),
        (replace(a_config(a_tenant(limits=Limits(cost_per_day=10**9))), pools=with_pool().pools), True),
        (replace(a_config(a_tenant(limits=Limits(requests_per_minute=100))), pools=with_pool().pools), False),
    ],
)
async def test_an_engine_is_asked_only_where_something_looks_at_tokens(config: Config, is_asked: bool) -> None:
    engine = Engine()
    async with a_router(engine, config=config) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat("hello")))[0] == 200
        assert (await client.answer(COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3]}))[0] == 200
    assert bool(engine.asked) is is_asked
    assert len(engine.asked) <= 1, "token ids need no engine"


@pytest.mark.parametrize("failure", [BackendFailed("away"), InvalidRequest("no")])
async def test_an_engine_that_fails_costs_no_request_anything(failure: ExpectedError) -> None:
    engine = Engine(failure=failure)
    async with a_router(engine, config=by_length()) as router, a_client(router) as client:
        for _ in range(3):
            assert (await client.answer(CHAT, a_chat("hello")))[0] == 200
    assert [prompt.token_ids for prompt in engine.prompts] == [b""] * 3
    # one that is away is left alone for a while, one that objects objects to this prompt
    assert len(engine.asked) == (1 if isinstance(failure, BackendFailed) else 3)


async def test_what_a_tokenizer_here_can_do_no_engine_is_asked_for(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    engine = Engine()
    config = replace(by_length(), pools=with_pool(str(tmp_path)).pools)
    async with a_router(engine, config=config) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat("hello")))[0] == 200
    assert engine.asked == []


async def test_many_tokens_are_listed_and_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_SLICE", 7)
    monkeypatch.setattr(text_tokenizer, "DECODED_TOKENS", 100)
    text = "the lazy dog \u4e5d\u5341 " * 2_000
    words = a_tokenizer().encode(text)
    async with a_router() as router, a_client(router) as client:
        _, reply = await client.answer("/tokenize", {"prompt": text, "return_token_strs": True})
        assert (reply["count"], reply["tokens"], reply["token_strs"]) == (len(words.ids), words.ids, words.tokens)
        _, reply = await client.answer("/detokenize", {"tokens": words.ids})
        assert reply == {"prompt": "<s>" + text}


async def test_a_reply_with_more_tokens_than_there_is_memory_for_is_refused() -> None:
    config = a_config(max_body_bytes=2**20, memory_bytes=32 * 2**20)
    async with a_router(config=config) as router, a_client(router) as client:
        text = "a b c " * 30_000
        assert (await client.answer("/tokenize", {"prompt": text}))[0] == 200
        status, reply = await client.answer("/tokenize", {"prompt": text, "return_token_strs": True})
        assert (status, reply["error"]["code"]) == (413, "request_too_large")
        assert "the reply would take more than" in reply["error"]["message"]
        status, reply = await client.answer("/detokenize", {"tokens": [5] * 200_000})
        assert (status, reply["error"]["code"]) == (413, "request_too_large")


async def got(client: Client, path: str, **options: Any) -> tuple[int, Any]:
    async with client.get(path, **options) as reply:
        return reply.status, await reply.json()


async def test_the_settings_of_the_tokenizer_are_told() -> None:
    assets = some_assets()
    async with a_router() as router, a_client(router) as client:
        for path in ("/tokenizer_info", f"/tokenizer_info?model={MODEL}"):
            status, info = await got(client, path)
            assert status == 200
            assert info["chat_template"] == ChatTemplate(assets).source
            assert (info["bos_token"], info["tokenizer_class"]) == ("<s>", "PreTrainedTokenizerFast")
        assert (await got(client, "/tokenizer_info?model=none"))[0] == 404
        assert (await got(client, "/tokenizer_info", key=None))[0] == 401
    async with a_router(Engine(), config=with_pool()) as router, a_client(router) as client:
        status, reply = await got(client, "/tokenizer_info")
        assert (status, reply["error"]["param"]) == (501, "model")
    async with a_router(ScriptedBackend(), ScriptedBackend("b1", model="other")) as router, a_client(router) as client:
        assert (await got(client, "/tokenizer_info"))[0] == 400


def test_each_token_of_the_settings_is_its_text_and_no_file_is_told() -> None:
    token = {"content": "<end>", "lstrip": False, "special": True, "__type": "AddedToken"}
    settings = {
        "eos_token": token,
        "added_tokens_decoder": {"2": token},
        "additional_special_tokens": [token, "<x>"],
        "vocab_file": "/home/someone/vocab.json",
        "merges_file": "merges.txt",
        "model_max_length": 1e30,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    assets = {**some_assets(), "tokenizer_config.json": json.dumps(settings).encode()}
    text = ModelText(assets, TextTokenizer(assets["tokenizer.json"], ChunkCache()), ChatTemplate(assets))
    info = json.loads(tokenizing.tokenizer_info(text))
    assert (info["eos_token"], info["added_tokens_decoder"]) == ("<end>", {"2": "<end>"})
    assert info["additional_special_tokens"] == ["<end>", "<x>"]
    assert (info["tokenizer_class"], info["model_max_length"]) == ("Qwen2Tokenizer", 1e30)
    assert info.keys().isdisjoint({"vocab_file", "merges_file"})
