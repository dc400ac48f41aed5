"""Images beside text: they go unchanged to backends with vision, and never to a shard."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anthropic
import openai
import pytest

from policies.sla.parse import parse
from router.start.app import Router
from shards.nouns import Submission
from shards.scripted import ScriptedEngine, ScriptedModel
from tests.backends.parts import END, a_model_folder, ids_of
from tests.e2e.test_clients import TEMPLATE
from tests.shards.attached import a_shard
from tests.standins.standin import TEXT, running
from tests.standins.vllm import VLLMServer

PNG = "iVBORw0KGgo" * 4000
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}, "uuid": "vendor"}
QUESTION = [{"type": "text", "text": "What is this?"}, IMAGE]
SLA = """
tenants: {{acme: {{anonymous: true}}}}
pools:
  blind: {{kind: shard, at: ["{shard}"]}}
{seeing}
server: {{http: "127.0.0.1:0", grpc: off}}
"""


def says(submission: Submission, prompt: bytes, choice: int) -> tuple[int, ...]:
    return ids_of("blind" + END)


@asynccontextmanager
async def a_router(folder: Path, *, sees: VLLMServer | None) -> AsyncIterator[str]:
    a_model_folder(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    engine = ScriptedEngine(says, model=ScriptedModel(name="m", path=folder))
    async with a_shard(engine) as shard, running(sees or VLLMServer()) as server:
        seeing = f'  seeing: {{kind: vllm, at: ["{server.url}"], model: m}}' if sees else ""
        async with Router(parse(SLA.format(shard=shard.address, seeing=seeing))) as router:
            assert await router.wait_until_reached(10)
            yield router.http_url
            router.check()


async def test_an_image_goes_whole_to_a_backend_that_sees_though_shards_serve_the_model_too(tmp_path: Path) -> None:
    server = VLLMServer()
    async with a_router(tmp_path, sees=server) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": QUESTION}])  # type: ignore[misc, list-item]
            assert answer.choices[0].message.content == TEXT
    chats = [call.body for call in server.received if call.path == "/v1/chat/completions"]
    assert [chat["messages"] for chat in chats] == [[{"role": "user", "content": QUESTION}]] * 3


async def test_anthropics_clients_send_images_to_it_too(tmp_path: Path) -> None:
    server = VLLMServer()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    async with a_router(tmp_path, sees=server) as url, anthropic.AsyncAnthropic(base_url=url, api_key="k") as client:
        answer = await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [block]}])  # type: ignore[list-item, typeddict-item]
    assert answer.content[0].type == "text"
    (chat,) = [call.body for call in server.received if call.path == "/v1/chat/completions"]
    assert chat["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": IMAGE["image_url"]["url"]}}]  # type: ignore[index]


async def test_an_image_for_a_model_without_vision_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with a_router(tmp_path, sees=None) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
        with pytest.raises(openai.BadRequestError, match="can read images") as refusal:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": QUESTION}])  # type: ignore[misc, list-item]
    assert refusal.value.param == "messages"
