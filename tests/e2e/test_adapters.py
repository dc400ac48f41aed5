"""LoRA adapters of shards over HTTP: models with answers and a cache of their own, placed where they are loaded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import save_file

from shards.engine import EngineOptions
from shards.lora.options import AdapterOptions
from tests.e2e.cluster import KEYS, MODEL, Whole, a_whole
from tests.shards.attached import eventually

LAYERS, HIDDEN, RANK = 3, 128, 4
WIDTHS = {"q_proj": 256, "v_proj": 128}
TEXT = "The keeper of the north gate is asked for the third key of the tower. " * 12


def save_adapter(folder: Path, seed: int) -> None:
    """A random adapter of the bundled model, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, width in WIDTHS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK, generator=generator)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 1}))
    save_file(tensors, folder / "adapter_model.safetensors")


class Client:
    def __init__(self, whole: Whole, http: aiohttp.ClientSession) -> None:
        self.whole, self._http = whole, http
        self._headers = {"Authorization": f"Bearer {KEYS['acme']}"}

    async def models(self) -> set[str]:
        async with self._http.get(f"{self.whole.router.http_url}/v1/models", headers=self._headers) as reply:
            return {model["id"] for model in (await reply.json())["data"]}

    async def ask(self, model: str, text: str = TEXT, *, status: int = 200) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        url = f"{self.whole.router.http_url}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=self._headers) as reply:
            answer = await reply.json()
            assert reply.status == status, answer
            return answer | {"backend": reply.headers.get("x-pointsman-backend")}


@asynccontextmanager
async def a_client(folder: Path) -> AsyncIterator[Client]:
    options = EngineOptions(kv_blocks=512, adapters=AdapterOptions(folder=folder, most=2, look_s=0.05))
    async with a_whole(2, options=options) as whole, aiohttp.ClientSession() as http:
        yield Client(whole, http)
        await whole.check_idle()


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_an_adapter_is_a_model_with_answers_and_a_cache_of_its_own(tmp_path: Path) -> None:
    for seed, name in enumerate(("sql", "poem")):
        save_adapter(tmp_path / name, seed)
    async with a_client(tmp_path) as client:
        assert await client.models() == {MODEL, "sql", "poem"}
        first = {model: await client.ask(model) for model in (MODEL, "sql", "poem")}
        assert len({content(answer) for answer in first.values()}) == 3
        assert {cached(answer) for answer in first.values()} == {0}
        for model, answer in first.items():
            again = await client.ask(model)
            # the router finds the blocks of the adapter by its name, and goes where they are
            assert (content(again), again["backend"]) == (content(answer), answer["backend"])
            assert cached(again) >= 128


async def test_further_prompts_go_where_the_adapter_is_loaded(tmp_path: Path) -> None:
    save_adapter(tmp_path / "sql", 0)
    async with a_client(tmp_path) as client:
        backends = {(await client.ask("sql", f"{number} {TEXT}"))["backend"] for number in range(4)}
        assert len(backends) == 1


async def test_an_adapter_is_served_as_soon_as_its_folder_is_there_and_not_any_more_when_it_is_gone(
    tmp_path: Path,
) -> None:
    async with a_client(tmp_path) as client:
        refused = await client.ask("sql", status=404)
        assert "sql" in refused["error"]["message"]
        save_adapter(tmp_path / "new", 0)
        (tmp_path / "new").rename(tmp_path / "sql")

        async def until(models: set[str]) -> None:
            while await client.models() != models:
                await eventually(lambda: True)

        await until({MODEL, "sql"})
        assert content(await client.ask("sql"))
        (tmp_path / "sql").rename(tmp_path.parent / f"{tmp_path.name} gone")
        await until({MODEL})
        await client.ask("sql", status=404)
