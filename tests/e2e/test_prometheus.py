"""A real Prometheus scrapes a router and evaluates the chart's rules on what it finds."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from policies.sla.parse import parse
from router.start.app import Router
from tests.engines.programs import free_ports
from tests.helm.chart import NAMESPACE, RELEASE, render
from tests.helm.test_dashboards import DASHBOARDS, panels
from tests.helm.value_sets import ELSEWHERE
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here; Debian has a package of this name")

SLA = """
classes: {{chat: {{ttft_p95: 1s, tpot_p95: 100ms}}}}
tenants: {{acme: {{anonymous: true}}}}
pools: {{own: {{kind: openai_compatible, at: ["{backend}"], model: m}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off, metrics: "127.0.0.1:0"}}
"""

SERVICE = f"{RELEASE}-pointsman-router"
VARIABLES = {"$namespace": NAMESPACE, "$service": SERVICE, "$__rate_interval": "10s"}
WITHOUT_CAUSE = {
    "Decisions that differ under the shadow file",
    "Predicted misses by step taken",
    "Prompt tokens found in a cache",
    "Refusals and failures by code",
    "SLA files accepted and rejected, rare events",
    "Waiting in the router",
}
"""Panels without a line after three requests that were answered at once."""


class Prometheus:
    """Its HTTP API at `url`."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http

    async def ask(self, path: str, **params: str) -> Any:
        async with self._http.get(f"{self._url}/api/v1/{path}", params=params) as reply:
            assert reply.status == 200, await reply.text()
            return (await reply.json())["data"]

    async def value(self, expression: str) -> float | None:
        found = (await self.ask("query", query=expression))["result"]
        return float(found[0]["value"][1]) if found else None

    async def until(self, expression: str) -> float:
        """The value as soon as there is one."""
        async with asyncio.timeout(20):
            while (value := await self.value(expression)) is None:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.1)
        return value


@asynccontextmanager
async def a_prometheus(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    classes = f"{ELSEWHERE}classes: {{chat: {{ttft_p95: 1s}}}}\n"
    rules = render({"sla": classes, "shards": [], "monitoring": {"rules": {"enabled": True}}})
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules.get("PrometheusRule")["spec"]["groups"]}))
    every = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"}
    job = {
        "job_name": "pointsman",
        "static_configs": [{"targets": [target], "labels": {"namespace": NAMESPACE, "service": SERVICE}}],
    }
    config = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": [job]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=error"]
    process = await asyncio.create_subprocess_exec(*command, stderr=DEVNULL)
    try:
        async with aiohttp.ClientSession() as http:
            prometheus = Prometheus(f"http://127.0.0.1:{port}", http)
            async with asyncio.timeout(20):
                while True:
                    try:
                        await prometheus.ask("status/runtimeinfo")
                        break
                    except (aiohttp.ClientConnectionError, AssertionError):
                        await asyncio.sleep(0.1)
            yield prometheus
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def a_scraped_router(folder: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus that has scraped a router after three requests."""
    async with (
        running(OpenAIServer()) as backend,
        Router(parse(SLA.format(backend=backend.url))) as router,
        aiohttp.ClientSession() as http,
        a_prometheus(folder, str(router.metrics)) as prometheus,
    ):
        assert await router.wait_until_reached(10)
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
        for _ in range(3):
            async with http.post(f"{router.http_url}/v1/chat/completions", json=body) as reply:
                assert reply.status == 200
                await reply.read()
        assert await prometheus.until('up{job="pointsman"} == 1') == 1
        finished = 'pointsman_requests_total{outcome="finished", service_class="chat", tenant="acme"}'
        assert await prometheus.until(f"{finished} == 3") == 3
        yield prometheus


async def test_a_routers_metrics_are_understood_and_every_rule_can_be_evaluated(tmp_path: Path) -> None:
    async with a_scraped_router(tmp_path) as prometheus:
        assert await prometheus.until("pointsman_ttft_seconds_count == 3") == 3
        groups = (await prometheus.ask("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) > 10
        async with asyncio.timeout(20):
            while any(rule["health"] == "unknown" for rule in rules):
                await asyncio.sleep(0.1)
                rules = [rule for group in (await prometheus.ask("rules"))["groups"] for rule in group["rules"]]
        assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


async def test_grafanas_variables_are_found_and_every_panel_draws_what_there_is(tmp_path: Path) -> None:
    async with a_scraped_router(tmp_path) as prometheus:
        # what label_values() of the dashboards' variables asks for
        namespaces = await prometheus.ask("label/namespace/values", **{"match[]": "pointsman_config_info"})
        services = await prometheus.ask(
            "label/service/values", **{"match[]": f'pointsman_config_info{{namespace="{NAMESPACE}"}}'}
        )
        assert (namespaces, services) == ([NAMESPACE], [SERVICE])
        async with asyncio.timeout(20):
            # rates are there after a second scrape
            while (undrawn := await panels_without_a_line(prometheus)) != WITHOUT_CAUSE:
                await asyncio.sleep(0.5)
                print(undrawn)
        assert undrawn == WITHOUT_CAUSE


async def panels_without_a_line(prometheus: Prometheus) -> set[str]:
    """Titles of panels of which no query has a result."""
    titles = set()
    for panel in (panel for path in DASHBOARDS for panel in panels(path)):
        queries = [target["expr"] for target in panel["targets"]]
        for name, value in VARIABLES.items():
            queries = [query.replace(name, value) for query in queries]
        if not any([(await prometheus.ask("query", query=query))["result"] for query in queries]):
            titles.add(panel["title"])
    return titles
