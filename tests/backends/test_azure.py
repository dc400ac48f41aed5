from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.azure import Azure, AzureOptions
from backends.openai.answer import deltas_of
from backends.openai.pooled import EMBEDDINGS_PATH
from policies.errors import BackendFailed, BackendRefused
from policies.nouns import Prompt
from tests.backends.parts import a_request, everything, text_of
from tests.standins.azure import AzureServer
from tests.standins.standin import TEXT, running


@asynccontextmanager
async def a_backend(server: AzureServer | None = None, **options: Any) -> AsyncIterator[tuple[Azure, AzureServer]]:
    async with running(server or AzureServer(key="k")) as standin:
        chosen = AzureOptions(**{"key": "k", "models": {"big": "m"}, **options})
        backend = Azure("a", standin.url, pool="p", options=chosen, clock=lambda: 0.0)
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_a_chat_goes_to_the_deployment_with_version_and_key() -> None:
    async with a_backend() as (backend, server):
        assert text_of(await everything(backend, a_request(model="big"))) == TEXT
    seen = server.received[0]
    assert seen.path == "/openai/deployments/m/chat/completions"
    assert seen.headers["api-key"] == "k"
    assert "authorization" not in seen.headers


async def test_embeddings_and_texts_have_paths_of_their_own() -> None:
    async with a_backend() as (backend, server):
        texts = Prompt(body={"model": "big", "input": "Hello"}, path=EMBEDDINGS_PATH)
        await everything(backend, a_request(model="big"), texts)
        await everything(backend, a_request(model="big"), Prompt(body={"prompt": "Hello"}, path="/v1/completions"))
    assert [seen.path for seen in server.received] == [
        "/openai/deployments/m/embeddings",
        "/openai/deployments/m/completions",
    ]


async def test_what_it_serves_are_the_deployments_of_the_file() -> None:
    async with a_backend() as (backend, _):
        await backend.probe()
        described = backend.describe()
    assert described is not None
    assert described.models == {"big"}


async def test_a_deployment_that_is_not_there_is_refused() -> None:
    async with a_backend(models={"big": "a/b"}) as (backend, _):
        with pytest.raises(BackendRefused, match="does not exist"):
            await everything(backend, a_request(model="big"))


@pytest.mark.parametrize("wrong", [{"key": "x"}, {"api_version": "1999-01-01"}])
async def test_a_wrong_key_or_version_fails_the_probe(wrong: dict[str, str]) -> None:
    async with a_backend(**wrong) as (backend, _):
        with pytest.raises(BackendFailed, match="401"):
            await backend.probe()


def test_the_verdict_on_the_prompt_that_comes_first_has_no_text() -> None:
    verdict = {"prompt_index": 0, "content_filter_results": {"hate": {"filtered": False, "severity": "safe"}}}
    assert list(deltas_of({"choices": [], "prompt_filter_results": [verdict], "object": ""})) == []
