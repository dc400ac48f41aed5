"""Engines that already run are recognized by what they answer; each kind by its own stand-in."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from policies.errors import ConfigError
from policies.sla.parse import parse
from router.start.commands.engines import KEY_VARIABLE, Engine, file_for, find_engine
from tests.standins.llama_cpp import LlamaCppServer
from tests.standins.lmdeploy import LMDeployServer
from tests.standins.mlc import MLCServer
from tests.standins.ollama import OllamaServer
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.sglang import SGLangServer
from tests.standins.standin import StandIn, running
from tests.standins.tabby import TabbyServer
from tests.standins.tgi import TGIServer
from tests.standins.vllm import VLLMServer


async def found(standin: StandIn, suffix: str = "", key: str | None = None) -> Engine:
    async with running(standin):
        return await asyncio.to_thread(find_engine, standin.url + suffix, key)


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        (VLLMServer, "vllm"),
        (SGLangServer, "sglang"),
        (LMDeployServer, "lmdeploy"),
        (LlamaCppServer, "llama_cpp"),
        (OllamaServer, "ollama"),
        (TGIServer, "tgi"),
        (TabbyServer, "tabby"),
        (MLCServer, "mlc"),
        (OpenAIServer, "openai_compatible"),
    ],
)
async def test_an_engine_is_recognized_by_its_answers(server: type[StandIn], kind: str) -> None:
    assert (await found(server())).kind == kind


class RealVLLM(VLLMServer):
    """As vLLM 0.32 lists its models; without metrics, as it may be started."""

    def model_card(self) -> dict[str, object]:
        return super().model_card() | {"owned_by": "vllm"}


async def test_the_owner_of_the_models_is_enough() -> None:
    engine = await found(RealVLLM(model="qwen", has_metrics=False), suffix="/v1/")
    assert (engine.kind, engine.sign, engine.models) == ("vllm", "/v1/models", ("qwen",))
    assert str(engine) == f"{engine.url} is vllm, by its /v1/models and serves qwen"
    assert not engine.url.endswith("/v1")


async def test_an_unknown_engine_is_used_by_openais_api() -> None:
    engine = await found(OpenAIServer(model="m"))
    assert str(engine) == f"{engine.url} speaks OpenAI's API and serves m; nothing shows which engine it is"


class Guarded(OpenAIServer):
    """Wants its key for the list of models too."""

    async def list_models(self, request: web.Request) -> web.Response:
        return await super().list_models(request) if self.lets_in(request) else web.Response(status=401)


async def test_an_engine_with_a_key_is_asked_with_it() -> None:
    with pytest.raises(ConfigError, match=rf"wants an API key \(set {KEY_VARIABLE} to its key\)"):
        await found(Guarded(key="k"))
    with pytest.raises(ConfigError, match="wants another API key"):
        await found(Guarded(key="k"), key="wrong")
    assert (await found(Guarded(key="k"), key="k")).kind == "openai_compatible"


async def test_a_server_that_is_no_engine_is_refused() -> None:
    class Page(OpenAIServer):
        async def list_models(self, request: web.Request) -> web.Response:
            return web.Response(text="<html>")

    with pytest.raises(ConfigError, match=r"answers, but as no engine .*/v1/models gave 200 \(check the address"):
        await found(Page())
    with pytest.raises(ConfigError, match="/v1/models gave 404"):
        await found(OpenAIServer(), suffix="/somewhere")


def test_an_address_where_nothing_answers_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"nothing answers at http://127.0.0.1:{port}: Connection refused"):
        find_engine(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["vllm:8000", "ftp://a", "http://user:pw@a", "http://"])
def test_a_text_that_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--to .* must be an address|--to .* must not contain a user"):
        find_engine(address)


def test_the_file_has_one_pool_for_each_kind() -> None:
    engines = [
        Engine("http://a:1", "vllm", None),
        Engine("http://b:1", "ollama", None),
        Engine("http://c:1", "vllm", None),
    ]
    pools = parse(file_for(engines, has_key=False)).pools
    assert {name: (pool.kind, pool.at, pool.key) for name, pool in pools.items()} == {
        "vllm": ("vllm", ("http://a:1", "http://c:1"), None),
        "ollama": ("ollama", ("http://b:1",), None),
    }
    with_key = parse(file_for(engines, has_key=True), environment={KEY_VARIABLE: "k"}).pools
    assert {pool.key for pool in with_key.values()} == {"k"}
