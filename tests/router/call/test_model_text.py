"""What a router knows of the prompts for backends that tokenize by themselves: exactly as many tokens as they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.nouns import Delta, Usage
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from router.text.token_ids import pack
from shards.kv.keys import block_keys, root_key
from tests.router.parts import (
    CHAT,
    COMPLETIONS,
    MODEL,
    ScriptedBackend,
    a_chat,
    a_client,
    a_config,
    a_router,
    a_tokenizer,
)
from tests.router.text.test_checkpoint import a_checkpoint


def with_pool(tokenizer: str | None = None) -> Config:
    return replace(a_config(), pools={"own": PoolSpec("own", kind="fake", model=MODEL, tokenizer=tokenizer)})


async def test_prompts_of_a_pool_with_a_tokenizer_are_counted_and_keyed_by_tokens(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    backend, words = ScriptedBackend(speaks_tokens=False), "the lazy dog " * 200
    ids = a_tokenizer().encode(f"<|user|>{words}\n<|assistant|>", add_special_tokens=False).ids
    async with a_router(backend, config=with_pool(str(tmp_path))) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat(words)))[0] == 200
    (request,), (prompt,) = backend.requests, backend.prompts
    assert request.prompt_tokens == len(ids)
    assert request.block_keys == block_keys(prompt.token_ids, root_key(MODEL, "acme"))
    assert len(request.block_keys) == len(ids) // 64 > 0
    assert prompt.body == a_chat(words)


async def test_without_a_tokenizer_they_are_estimated() -> None:
    backend = ScriptedBackend(speaks_tokens=False)
    async with a_router(backend, config=with_pool()) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat("the lazy dog " * 200)))[0] == 200
    assert backend.prompts[0].token_ids == b""


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_backend_that_knows_tools_is_asked_for_no_grammar_of_ours(tmp_path: Path, choice: object) -> None:
    a_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<tool_call>{{ tools }}{{ messages }}")
    backend = ScriptedBackend(speaks_tokens=False)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with a_router(backend, config=with_pool(str(tmp_path))) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, a_chat(tools=[tool], tool_choice=choice))
    assert status == 200
    assert backend.requests[0].sampling.grammar is None


@pytest.mark.parametrize("where", [{"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}])
async def test_a_template_of_the_clients_own_is_left_to_engines_and_refused_by_shards(
    tmp_path: Path, where: dict[str, object]
) -> None:
    a_checkpoint(tmp_path)
    engine, shard = ScriptedBackend(speaks_tokens=False), ScriptedBackend()
    async with a_router(engine, config=with_pool(str(tmp_path))) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat(**where)))[0] == 200
        assert engine.prompts[0].token_ids == b""
    async with a_router(shard) as router, a_client(router) as client:
        status, body = await client.answer(CHAT, a_chat(**where))
    assert (status, body["error"]["param"]) == (400, "chat_template")
    assert "operators can give a pool one" in body["error"]["message"] + str(body)


async def test_several_texts_for_embeddings_are_measured_together_and_so_only_estimated(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    body = {"model": MODEL, "input": "the dog"}
    embedding = Delta(finish_reason="stop", usage=Usage(3, 0, 0), body=b'{"data": []}')
    backend = ScriptedBackend(speaks_tokens=False, scripts=[[embedding], [embedding]])
    async with a_router(backend, config=with_pool(str(tmp_path))) as router, a_client(router) as client:
        assert (await client.answer("/v1/embeddings", body))[0] == 200
        assert (await client.answer("/v1/embeddings", {**body, "input": ["the dog"] * 3}))[0] == 200
    assert [bool(prompt.token_ids) for prompt in backend.prompts] == [True, False]


async def test_token_ids_are_exact_without_any_tokenizer() -> None:
    backend = ScriptedBackend(speaks_tokens=False)
    ids = list(range(1, 200))
    async with a_router(backend, config=with_pool()) as router, a_client(router) as client:
        assert (await client.answer(COMPLETIONS, {"model": MODEL, "prompt": ids}))[0] == 200
    (request,), (prompt,) = backend.requests, backend.prompts
    assert request.prompt_tokens == len(ids)
    assert request.block_keys == block_keys(prompt.token_ids, root_key(MODEL, "acme"))
    assert prompt.token_ids == pack(ids)


class Bare(ScriptedBackend):
    """A shard with a checkpoint that has no tokenizer."""

    def assets(self) -> dict[str, bytes]:
        return {}


async def test_a_shard_without_a_tokenizer_answers_token_ids_and_says_what_text_needs(tmp_path: Path) -> None:
    bare = Bare()
    async with a_router(bare, config=with_pool()) as router, a_client(router) as client:
        assert (await client.answer(COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3]}))[0] == 200
        assert bare.prompts[0].token_ids == pack([1, 2, 3])
        for path, body in ((CHAT, a_chat()), (COMPLETIONS, {"model": MODEL, "prompt": "hello"})):
            status, reply = await client.answer(path, body)
            assert status == 400
            assert "has no tokenizer, so it reads no text" in reply["error"]["message"]
    a_checkpoint(tmp_path)
    async with a_router(Bare(), config=with_pool(str(tmp_path))) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat()))[0] == 200
