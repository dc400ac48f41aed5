"""What our shards do not do is refused by its name, never left out silently."""

from __future__ import annotations

from typing import Any

import pytest

from policies.errors import InvalidRequest
from router.call.undone_fields import READ, refuse_undone
from router.protocols.openai.fields import ChatBody, CompletionBody
from tests.router.parts import CHAT, COMPLETIONS, MODEL, ScriptedBackend, a_chat, a_client, a_router

ASKED: dict[str, Any] = {
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "prompt_logprobs": 0,
    "return_token_ids": True,
    "skip_special_tokens": False,
    "use_beam_search": True,
    "thinking_token_budget": 0,
    "prompt_embeds": "AAAA",
    "no_stop_trim": True,
    "repeat_penalty": 1.1,
    "mirostat": 2,
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "typical_p": 0.5,
}
NOTHING: dict[str, Any] = {
    "bad_words": [],
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "return_token_ids": False,
    "skip_special_tokens": True,
    "repeat_penalty": 1.0,
    "mirostat": 0,
    "functions": None,
    "modalities": ["text"],
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "cache_salt": "s",
    "models": ["m"],
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@pytest.mark.parametrize("name", ASKED)
def test_a_field_that_changes_the_answer_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refusal:
        refuse_undone({**a_chat(), name: ASKED[name]})
    assert refusal.value.param == name


@pytest.mark.parametrize("name", NOTHING)
def test_a_value_that_asks_for_nothing_passes_and_so_does_a_hint(name: str) -> None:
    refuse_undone({**a_chat(), name: NOTHING[name]})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temperatur", "temperature"), ("max_token", "max_tokens"), ("top_log_probs", "top_logprobs"), ("stops", "stop")],
)
def test_a_misspelled_field_is_refused_with_the_field_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        refuse_undone({**a_chat(), name: 1})
    assert f"'{meant}'" in refusal.value.hint


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_shard", [True, False])
async def test_only_models_of_shards_refuse_them(path: str, is_shard: bool) -> None:
    body = {**a_chat(), "bad_words": ["x"]} if path == CHAT else {"model": MODEL, "prompt": "a", "bad_words": ["x"]}
    async with a_router(ScriptedBackend(speaks_tokens=is_shard)) as router, a_client(router) as client:
        assert (await client.answer(path, body))[0] == (400 if is_shard else 200)


def test_a_field_that_is_read_is_not_refused_whatever_it_asks_for() -> None:
    assert {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__} == READ
