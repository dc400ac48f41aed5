"""A field that shards do not do is refused only where nothing but shards serves the model."""

from __future__ import annotations

from typing import Any

import pytest

from policies.nouns import Capability
from tests.router.parts import ScriptedBackend, a_chat, a_client, a_router, an_answer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
UNDONE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"bad_words": ["x"]}),
    (CHAT, {"return_token_ids": True}),
    (CHAT, {"chat_template": "{{ messages }}"}),
    (TEXT, {"prompt": "hello", "prompt_logprobs": 1}),
    (TEXT, {"prompt": "hello", "use_beam_search": True}),
]


def an_engine(*, well: bool = True) -> ScriptedBackend:
    """A server that reads text, and bodies as they come."""
    able = frozenset(Capability) - {Capability.PINS}
    return ScriptedBackend("engine", scripts=[an_answer("ok")], speaks_tokens=False, capabilities=able, well=well)


def a_body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {**({} if path == TEXT else a_chat()), "model": "m", "max_tokens": 3, **fields}


@pytest.mark.parametrize(("path", "fields"), UNDONE)
async def test_it_goes_to_an_engine_that_reads_the_body_itself(path: str, fields: dict[str, Any]) -> None:
    shard, engine = ScriptedBackend(), an_engine()
    async with a_router(shard, engine) as router, a_client(router) as client:
        status, answer = await client.answer(path, {**a_body(path, fields), "model": shard.model})
    assert status == 200, answer
    assert (len(shard.prompts), len(engine.prompts)) == (0, 1)
    body = engine.prompts[0].body
    assert body is not None
    assert fields.items() <= body.items(), "nothing of it is lost"


@pytest.mark.parametrize(("path", "fields"), UNDONE)
async def test_it_is_refused_by_its_name_where_shards_are_alone(path: str, fields: dict[str, Any]) -> None:
    shard = ScriptedBackend()
    async with a_router(shard) as router, a_client(router) as client:
        status, answer = await client.answer(path, {**a_body(path, fields), "model": shard.model})
    assert status == 400
    assert next(name for name in fields if name != "prompt") in str(answer)
    assert shard.prompts == []


async def test_what_shards_do_goes_to_either() -> None:
    shard, engine = ScriptedBackend(scripts=[an_answer("ok")]), an_engine()
    async with a_router(shard, engine) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, {**a_chat(), "model": shard.model})
    assert status == 200
    (prompt,) = [*shard.prompts, *engine.prompts]
    assert prompt.native is None or prompt.native.untranslated is None
