"""LoRA adapters of real vLLMs behind a router: requests go where their adapter is, and adapters share no cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shards.bundled import NAME
from shards.bundled.documents import prompt
from tests.engines.lora import an_adapter
from tests.engines.programs import VLLM, VLLMOptions
from tests.engines.routed import Client, a_document, a_router
from tests.shards.attached import eventually

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

LORA = ("--max-lora-rank", "8", "--max-loras", "2")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "poem")):
        an_adapter(folder, name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def pair(engines: Engines, adapters: Path) -> tuple[VLLM, VLLM]:
    """A vLLM with the adapter `sql`, and one without adapters that can load them."""
    there = {"VLLM_PLUGINS": "lora_filesystem_resolver", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    options = VLLMOptions(
        environment=(*there.items(), ("VLLM_LORA_RESOLVER_CACHE_DIR", str(adapters))), extra=("--enable-lora", *LORA)
    )
    engines.begin("loads", options)
    (has,) = engines.vllm("has", options=VLLMOptions(adapters=(("sql", adapters / "sql"),), extra=LORA))
    (loads,) = engines.vllm("loads", options=options)
    return has, loads


def pool_of_both(pair: tuple[VLLM, VLLM], **options: str | list[str]) -> dict[str, object]:
    # no `model`: what the servers list and what the pool names is served
    return {"kind": "vllm", "at": [each.url for each in pair], "options": options, "health": {"probe_every": "200ms"}}


async def ask(client: Client, model: str, text: str) -> tuple[str, int]:
    """Which backend answered, and how much of the prompt was cached there."""
    answer = await client.chat(text, model=model, max_tokens=4)
    return answer.backend, answer.cached_tokens


async def test_requests_for_an_adapter_go_where_it_is_and_its_cache_is_not_that_of_the_model(
    pair: tuple[VLLM, VLLM],
) -> None:
    async with a_router(pool_of_both(pair)) as (client, router):
        # a feed is live after its engine's first event, and only later events are compared
        about = a_document(39)
        await ask(client, "sql", prompt(about.text, about.questions[0].question))
        await eventually(lambda: router.gateway.beliefs.is_live("engines-0"))
        texts = [prompt(about.text, about.questions[0].question) for about in map(a_document, range(40, 44))]
        for text in texts:
            assert await ask(client, "sql", text) == ("engines-0", 0), "the other one does not list it"
        for text in texts:
            backend, cached = await ask(client, "sql", text)
            assert (backend, cached > 600) == ("engines-0", True)
        # twice as many: they are spread over both, and one backend needs four to prove its events
        texts += [prompt(about.text, about.questions[0].question) for about in map(a_document, range(44, 48))]
        for text in texts:
            _, cached = await ask(client, NAME, text)
            assert cached == 0, "what an adapter computed is none of the model's"
        again = [await ask(client, NAME, text) for text in texts]
        # on a busy machine an engine may look so slow that a prompt is computed again at the other one
        assert sum(cached > 600 for _, cached in again) >= 6
        parity = router.gateway.beliefs.parity
        # the blocks that events tell of are those that the router computed, of the adapter and of the model
        await eventually(lambda: "engines-0" in parity.proven("sql") and bool(parity.proven(NAME)))
        assert not parity.broken("sql")
        assert not parity.broken(NAME)
        router.check()


async def test_an_adapter_that_no_backend_has_is_loaded_by_one_that_can_and_stays_there(
    pair: tuple[VLLM, VLLM],
) -> None:
    async with a_router(pool_of_both((pair[1],), adapters=["poem"])) as (client, router):
        description = router.gateway.cluster.backend("engines-0").describe()
        assert description is not None
        assert description.loadable == {"poem"}
        backend, _ = await ask(client, "poem", "Hello")
        assert backend == "engines-0"

        def is_listed() -> bool:
            description = router.gateway.cluster.backend("engines-0").describe()
            return description is not None and description.adapters == {"poem"} and not description.loadable

        await eventually(is_listed)


async def test_a_backend_that_has_the_adapter_goes_before_one_that_would_load_it(pair: tuple[VLLM, VLLM]) -> None:
    async with a_router(pool_of_both(pair, adapters=["sql"])) as (client, router):
        answers = [await ask(client, "sql", f"Hello number {number}") for number in range(12)]
        assert {backend for backend, _ in answers} == {"engines-0"}
        explained = router.gateway.cluster.view(router.gateway.clock(), model="sql").backends
        assert [view.adapter for view in explained] == ["ready", "loads"]
