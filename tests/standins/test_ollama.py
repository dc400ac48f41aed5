"""The stand-in answers Ollama's own client library as that library expects."""

from __future__ import annotations

import pytest
from ollama import AsyncClient, ResponseError

from tests.standins.ollama import OllamaServer
from tests.standins.standin import TEXT, running

HELLO = [{"role": "user", "content": "Hello"}]


async def test_the_client_reads_a_streamed_chat() -> None:
    async with running(OllamaServer(thinking="Hm", calls=(("f", {"a": 1}),))) as server:
        client = AsyncClient(server.url)
        parts = [part async for part in await client.chat("m", HELLO, stream=True, options={"num_ctx": 64})]
        loaded = (await client.ps()).models
        await client.close()
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert parts[0].message.thinking == "Hm"
    (call,) = parts[-2].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("f", {"a": 1})
    assert (parts[-1].done, parts[-1].done_reason, parts[-1].prompt_eval_count) == (True, "stop", 5)
    assert [(model.model, model.context_length) for model in loaded] == [("m:latest", 64)]


async def test_the_client_reads_a_whole_text_and_what_is_known_of_models() -> None:
    async with running(OllamaServer(modelfile_num_ctx=64, model="m")) as server:
        client = AsyncClient(server.url)
        answer = await client.generate("m", "Hello", raw=True, options={"num_predict": 3})
        (listed,) = (await client.list()).models
        shown = await client.show("m")
        await client.close()
    assert (answer.response, answer.done_reason, answer.eval_count) == (TEXT[:3], "length", 3)
    assert listed.model == "m:latest"
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 4096
    assert shown.parameters is not None
    assert shown.parameters.split() == ["num_ctx", "64", "stop", '"<|eot_id|>"']


async def test_a_long_prompt_is_cut_silently_as_ollama_does_unless_configured_otherwise() -> None:
    long = [{"role": "user", "content": "x" * 100}]
    async with running(OllamaServer()) as server:
        client = AsyncClient(server.url)
        cut = await client.chat("m", long, options={"num_ctx": 64})
        with pytest.raises(ResponseError) as missing:
            await client.chat("nobody", HELLO)
        await client.close()
    assert cut.prompt_eval_count == 64
    assert missing.value.status_code == 404
