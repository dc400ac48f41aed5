"""Official clients get the reasoning that a shard's model writes into its text apart from the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest

from policies.sla.parse import parse
from router.start.app import Router
from shards.nouns import Submission
from shards.scripted import ScriptedEngine, ScriptedModel
from tests.backends.parts import END, a_model_folder, ids_of
from tests.e2e.test_clients import SLA
from tests.shards.attached import a_shard

OPENED = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content.split('</think>')[-1] }}{% endfor %}<think>\n"
)
CLOSED = OPENED.removesuffix("<think>\n")


@pytest.fixture(params=[OPENED, CLOSED], ids=["the prompt opens it", "the answer opens it"])
async def router(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Router]:
    start = "" if request.param is OPENED else "<think>\n"

    def says(_: Submission, __: bytes, ___: int) -> tuple[int, ...]:
        return ids_of(f"{start}Two and two.\n</think>\n\nFour.{END}")

    a_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": request.param}))
    engine = ScriptedEngine(says, model=ScriptedModel(name="m", path=tmp_path))
    async with a_shard(engine) as shard:
        config = parse(
            SLA.format(kind="shard", address=shard.address, more=""), environment={"CLIENT_KEY": "client-key"}
        )
        async with Router(config) as router:
            assert await router.wait_until_reached(10)
            yield router
            router.check()


async def test_openais_client_gets_it_streamed_and_whole(router: Router) -> None:
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="client-key", max_retries=0) as client:
        asked = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}
        whole = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == "Four."
        assert whole.choices[0].message.model_extra["reasoning_content"] == "Two and two."
        thought, text = "", ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
            for choice in chunk.choices:
                thought += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                text += choice.delta.content or ""
        assert (thought, text) == ("Two and two.", "Four.")


async def test_anthropics_client_gets_a_block_of_thinking(router: Router) -> None:
    async with anthropic.AsyncAnthropic(base_url=router.http_url, api_key="client-key", max_retries=0) as client:
        answer = await client.messages.create(
            model="m", max_tokens=100, messages=[{"role": "user", "content": "2 + 2?"}]
        )
    blocks = [
        (block.type, getattr(block, "thinking", None) or getattr(block, "text", None)) for block in answer.content
    ]
    assert blocks == [("thinking", "Two and two."), ("text", "Four.")]
