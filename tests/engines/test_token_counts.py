"""Counts and ids of prompts against a real vLLM, for every kind of request that changes what a template prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from benchmarks.token_counts import calls, config_of, counted
from policies.sla.parse import parse
from router.start.app import Router
from shards.bundled import weights
from tests.engines.programs import PLAIN

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

RICH = Path(__file__).parent / "rich.jinja"


@pytest.mark.parametrize("template", [None, RICH], ids=["own", "rich"])
async def test_every_prompt_is_counted_and_read_as_the_engine_does(engines: Engines, template: Path | None) -> None:
    (vllm,) = engines.vllm("a", options=replace(PLAIN, template=template))
    chat_template = None if template is None else str(template)
    config = parse(config_of(vllm.url, tokenizer=str(weights()), chat_template=chat_template))
    async with Router(config) as router, aiohttp.ClientSession() as http:
        assert await router.wait_until_reached(20)
        seen = [await counted(router, http, call) for call in calls(54, seed=7)]
    assert [compared for compared in seen if not compared.is_right] == []
    assert len({compared.call.kind for compared in seen}) == 18


async def test_the_checkpoint_that_the_engine_names_is_found_without_any_setting(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    async with Router(parse(config_of(vllm.url))) as router, aiohttp.ClientSession() as http:
        assert await router.wait_until_reached(20)
        seen = [await counted(router, http, call) for call in calls(18, seed=8)]
        assert list(router.gateway.sources.origins().values()) == [f"its engine's checkpoint {weights()}"]
    assert [compared for compared in seen if not compared.is_right] == []
