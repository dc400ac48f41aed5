"""A name that stands for a model with request changes: in every dialect, in tokens, keys, limits and lists."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.json_members import ABSENT
from policies.aliases import Alias
from policies.errors import InvalidRequest
from policies.nouns import Limits
from policies.rules import Rule, When
from policies.sla.config import Config
from router.protocols.aliases import aliased, changed, changed_bytes
from router.protocols.grpc.v1 import inference_pb2 as pb
from tests.e2e.test_pass_through import Engine, a_house
from tests.router.parts import MODEL, ScriptedBackend, a_chat, a_client, a_config, a_router, a_tenant, an_answer
from tests.router.protocols.grpc.test_server import METADATA, a_stub

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BOT = Alias(
    "bot",
    MODEL,
    defaults={"temperature": 0.5, "stop": "END"},
    force={"max_tokens": 9},
    remove=("seed",),
    system="Be brief.",
)


def with_alias(alias: Alias = BOT, config: Config | None = None) -> Config:
    return replace(config or a_config(), aliases={alias.name: alias})


def body_of(path: str, body: dict[str, Any], alias: Alias = BOT) -> dict[str, Any]:
    return changed(body, aliased(body, path, {alias.name: alias}))


HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        (
            CHAT,
            {"model": "bot", "messages": [HI], "seed": 3, "max_completion_tokens": 99},
            {
                "model": "bot",
                "messages": [{"role": "system", "content": "Be brief."}, HI],
                "temperature": 0.5,
                "stop": "END",
                "max_tokens": 9,
            },
        ),
        (
            CHAT,
            {
                "model": "bot",
                "messages": [{"role": "developer", "content": "Be kind."}, HI],
                "temperature": 1,
                "stop": "x",
            },
            {
                "model": "bot",
                "messages": [{"role": "developer", "content": "Be brief.\n\nBe kind."}, HI],
                "temperature": 1,
                "stop": "x",
                "max_tokens": 9,
            },
        ),
        (
            RESPONSES,
            {"model": "bot", "input": "Hi", "max_output_tokens": 99},
            {
                "model": "bot",
                "input": "Hi",
                "temperature": 0.5,
                "stop": "END",
                "max_output_tokens": 9,
                "instructions": "Be brief.",
            },
        ),
        (
            MESSAGES,
            {"model": "bot", "messages": [HI], "system": [{"type": "text", "text": "Be kind."}]},
            {
                "model": "bot",
                "messages": [HI],
                "system": [{"type": "text", "text": "Be brief.\n\n"}, {"type": "text", "text": "Be kind."}],
                "temperature": 0.5,
                "stop_sequences": ["END"],
                "max_tokens": 9,
            },
        ),
        (
            f"{MESSAGES}/count_tokens",
            {"model": "bot", "messages": [HI], "system": "Be kind."},
            {
                "model": "bot",
                "messages": [HI],
                "system": "Be brief.\n\nBe kind.",
                "temperature": 0.5,
                "stop_sequences": ["END"],
                "max_tokens": 9,
            },
        ),
    ],
)
def test_a_body_changes_in_the_words_of_its_dialect(path: str, body: dict[str, Any], sent: dict[str, Any]) -> None:
    assert body_of(path, body) == sent
    raw = json.dumps(body).encode()
    assert json.loads(changed_bytes(raw, aliased(body, path, {"bot": BOT}))) == sent


def test_other_models_and_wrong_bodies_change_nothing() -> None:
    for body in ({"model": MODEL, "messages": []}, {"model": 3}, {}):
        assert aliased(body, CHAT, {"bot": BOT}) == {}
    assert aliased({"model": "bot", "messages": 3}, CHAT, {"bot": replace(BOT, defaults={}, force={})}) == {}
    assert aliased({"model": "bot", "seed": 3}, CHAT, {"bot": BOT})["seed"] is ABSENT


def test_a_default_counts_as_sent_where_the_client_sent_null() -> None:
    body = {"model": "bot", "messages": [HI], "temperature": None}
    assert body_of(CHAT, body)["temperature"] == 0.5


@given(st.dictionaries(st.sampled_from(["a", "b", "seed", "stop", "x"]), st.integers(), max_size=4))
def test_bytes_that_do_not_change_stay(members: dict[str, int]) -> None:
    body = {"model": "bot", "messages": [HI], **members}
    raw = json.dumps(body, separators=(" ,  ", " :\t")).encode()
    changes = aliased(body, CHAT, {"bot": replace(BOT, system=None)})
    sent = changed_bytes(raw, changes)
    assert json.loads(sent) == changed(body, changes)
    assert b'"messages" :\t[{"role" :\t"user" ,  "content" :\t"Hi"}]' in sent


async def test_a_shard_gets_the_whole_prompt_and_the_changed_sampling_and_the_answer_has_the_alias() -> None:
    backend = ScriptedBackend(scripts=[an_answer("x"), an_answer("x")])
    async with a_router(backend, config=with_alias()) as router, a_client(router) as client:
        status, answer = await client.answer(CHAT, a_chat(model="bot"))
        assert (status, answer["model"]) == (200, "bot")
        whole = a_chat(max_tokens=9, temperature=0.5, stop="END")
        whole["messages"] = [{"role": "system", "content": "Be brief."}, *whole["messages"]]
        _, plain = await client.answer(CHAT, whole)
        assert plain["model"] == MODEL
    aliased_request, request = backend.requests
    aliased_prompt, prompt = backend.prompts
    assert aliased_request.model == request.model == MODEL
    assert aliased_prompt.token_ids == prompt.token_ids
    assert aliased_request.block_keys == request.block_keys
    assert aliased_request.sampling == request.sampling
    assert aliased_request.max_new_tokens == request.max_new_tokens == 9


async def test_over_grpc_it_is_the_same() -> None:
    backend = ScriptedBackend()
    async with a_stub(backend, config=with_alias(config=a_config(grpc="127.0.0.1:0"))) as (stub, _):
        messages = pb.Messages(messages=[pb.Message(role="user", content="hello")])
        await stub.Complete(pb.GenerateRequest(model="bot", chat=messages), metadata=METADATA)
        listed = await stub.ListModels(pb.ListModelsRequest(), metadata=METADATA)
        assert sorted(model.id for model in listed.models) == sorted(["bot", MODEL])
        counts = [
            (await stub.CountTokens(pb.CountTokensRequest(model=name, chat=messages), metadata=METADATA)).tokens
            for name in ("bot", MODEL)
        ]
        assert counts[0] > counts[1]
    (request,) = backend.requests
    assert (request.model, request.max_new_tokens, request.sampling.temperature) == (MODEL, 9, 0.5)


async def test_lists_show_aliases_to_those_who_may_use_them() -> None:
    only_bot, other = a_tenant(models=frozenset({"bot"})), a_tenant("other", key="o", models=frozenset({MODEL}))
    async with a_router(config=with_alias(config=a_config(only_bot, other))) as router, a_client(router) as client:
        async with client.get("/v1/models") as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["bot"]
        async with client.get("/v1/models", key="o") as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == [MODEL]
        assert (await client.answer(CHAT, a_chat(model="bot")))[0] == 200
        assert (await client.answer(CHAT, a_chat()))[0] == 404
        assert (await client.answer(CHAT, a_chat(model="bot"), key="o"))[0] == 404


async def test_rules_go_by_the_alias_and_limits_by_the_model() -> None:
    tenant = a_tenant(model_limits={MODEL: Limits(requests_per_minute=1)})
    rules = (Rule("batch", When(model=("bot",))), Rule("chat"))
    config = replace(with_alias(config=a_config(tenant)), rules=rules)
    async with a_router(config=config) as router, a_client(router) as client:
        async with client.post(CHAT, a_chat(model="bot")) as reply:
            assert (reply.status, reply.headers["x-pointsman-class"]) == (200, "batch")
        assert (await client.answer(CHAT, a_chat()))[0] == 429


async def test_a_text_completion_has_no_place_for_a_system_prompt() -> None:
    async with a_router(config=with_alias()) as router, a_client(router) as client:
        status, answer = await client.answer("/v1/completions", {"model": "bot", "prompt": "Hi"})
        assert status == 400
        assert "the model 'bot' cannot be used here" in answer["error"]["message"]
        alias = replace(BOT, system=None)
    with pytest.raises(InvalidRequest):
        aliased({"model": "bot", "input": "x"}, "/v1/embeddings", {"bot": BOT})
    assert aliased({"model": "bot", "prompt": "x"}, "/v1/completions", {"bot": alias})["max_tokens"] == 9


async def test_an_engine_of_the_same_dialect_gets_the_bytes_with_only_the_changes_and_its_answer_the_alias() -> None:
    engine = Engine()
    async with a_house(engine) as house:
        gateway = house.router.gateway
        alias = Alias("bot", "m", force={"max_tokens": 9}, system="Be brief.")
        gateway.config = replace(gateway.config, aliases={"bot": alias})
        raw = b'{"model":"bot", "odd" : [1.0,2e0],"messages":[{"role":"user","content":"H\\u00e9"}],"stream":true}'
        streamed = await house.answer(raw)
        whole = await house.answer(json.dumps(a_chat(model="bot")).encode())
    assert json.loads(whole)["model"] == "bot"
    assert b'"model":"bot"' in streamed
    assert b'"model":"m"' not in streamed
    sent, _ = engine.received[0]
    assert b'"odd" : [1.0,2e0]' in sent
    assert json.loads(sent)["model"] == "m"
    assert json.loads(sent)["max_tokens"] == 9
    assert json.loads(sent)["messages"][0] == {"role": "system", "content": "Be brief."}
