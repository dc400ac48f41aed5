"""A router with something to show in every panel of the dashboard, and a page on which all of them are open."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from policies.learning.cost import Latency
from router.fleet.cluster.cluster import HealthRules
from router.start.app import Router
from router.start.config_file import ConfigFile
from tests.router.operate.dashboard.browser import Page
from tests.router.operate.dashboard.scene import KEYS, PacedBackend, a_document, ask, keep, listening
from tests.router.parts import COMPLETIONS, MODEL

FILE = """
classes:
  interactive: {{ttft_p95: 250ms, tpot_p95: 30ms, weight: 8}}
  long-rag:    {{ttft_p95: 800ms, tpot_p95: 40ms, weight: 4}}
  batch:       {{deadline: 15m, preemptible: true}}
tenants:
  acme:
    keys: ["${{env:ACME}}"]
    weight: 4
    limits: {{requests_per_minute: 2000, tokens_per_minute: 4M, budget_per_day: 5 USD}}
    teams: {{search: {{limits: {{budget_per_month: 40 USD}}}}}}
  labs:    {{keys: ["${{env:LABS}}"], weight: 2, limits: {{tokens_per_minute: 2M, soft_budget_per_hour: 0.02 USD}}}}
  archive: {{keys: ["${{env:ARCHIVE}}"], classes: [batch], limits: {{requests_per_minute: 80}}}}
  everyone: {{anonymous: true, classes: [interactive]}}
pools:
  own:  {{kind: fake, at: ["a:1", "b:1", "c:1"], model: tiny}}
  spot: {{kind: fake, at: ["d:1"], model: tiny}}
  next: {{kind: fake, at: ["e:1"], model: tiny}}
rules:
  - {{when: {{tenant: archive}}, class: batch, pools: own}}
  - {{when: {{prompt_tokens: ">= 1k", tenant: [acme, labs]}}, class: long-rag, pools: {{own: 80, spot: 20}}}}
  - {{class: interactive, pools: own, mirror: {{pool: next, share: 30%}}}}
cost: {{currency: USD, uncached: 2, cached: 0.2, output: 8}}
usage: {{store: {folder}/usage.sqlite}}
batches: {{store: {folder}/batches}}
server: {{http: "127.0.0.1:0", grpc: off, admin: "127.0.0.1:0", drain: 1s,
  keys_file: {folder}/keys.jsonl, decision_log: {folder}/decisions.jsonl}}
"""
SLOW = Latency(fixed_s=0.03, token_s=6e-4, step_s=0.02)
SHOWN = "document.documentElement.dataset.shown"
ENDED = "[...document.querySelectorAll('#stream tbody tr')].find((row) => /long-rag.*finished/s.test(row.innerText))"
BATCH_LINES = 2000


@dataclass
class Everything:
    """The router, its file and its backends, and a client without a key."""

    router: Router
    file: Path
    backends: tuple[PacedBackend, ...]
    http: aiohttp.ClientSession

    @property
    def page(self) -> str:
        return f"http://{self.router.admin}/dashboard"

    async def settle(self) -> None:
        """Have keys, prefixes, a batch, an earlier version of the file, a draft, and a request of each kind."""
        keys = self.router.gateway.keys
        await keys.issue("acme", name="ci", lives_s=90 * 86400.0, limits=None)
        await keys.issue("acme", name="notebooks", lives_s=None, limits=None)
        await keep(self.router, self.http, "acme", a_document(0, 1700), shards=2, ttl="8h")
        await keep(self.router, self.http, "labs", a_document(10, 1250), shards=4, ttl="45m")
        await self._begin_batch()
        text = self.file.read_text()
        await self._write(text.replace("weight: 8", "weight: 9"))
        await self._draft(text.replace("weight: 2,", "weight: 3,").replace('["d:1"]', '["d:1", "f:1"]'))
        for tenant, words in (("acme", 1700), ("labs", 1250), ("acme", 30), ("everyone", 20)):
            assert await ask(self.router, self.http, tenant, a_document(0, words)) == 200

    async def _begin_batch(self) -> None:
        body = {"model": MODEL, "prompt": "the fox", "max_tokens": 40}
        line = {"method": "POST", "url": COMPLETIONS, "body": body}
        lines = "\n".join(json.dumps({"custom_id": f"r{number}", **line}) for number in range(BATCH_LINES))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", lines.encode(), filename="lines.jsonl")
        headers = {"authorization": f"Bearer {KEYS['labs']}"}
        async with self.http.post(f"{self.router.http_url}/v1/files", data=form, headers=headers) as reply:
            file = (await reply.json())["id"]
        job = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        async with self.http.post(f"{self.router.http_url}/v1/batches", json=job, headers=headers) as reply:
            assert reply.status == 200, await reply.text()

    async def _draft(self, text: str) -> str:
        url = f"http://{self.router.admin}/admin/config/drafts"
        async with self.http.post(url, data=text.encode()) as reply:
            report = await reply.json()
        assert not report["problems"], report
        return str(report["version"])

    async def _write(self, text: str) -> None:
        version = await self._draft(text)
        url = f"http://{self.router.admin}/admin/config/drafts/{version}/apply"
        async with self.http.post(url) as reply:
            assert reply.status == 200, await reply.text()

    async def open_all(self, page: Page) -> None:
        """Have every panel on `page` show something."""
        for panel in ("kept", "shared", "mirrored", "batched", "budgeted", "keyed", "filed"):
            await page.until(f"!document.querySelector('#{panel}').hidden")
        await page.until(ENDED)
        await page.run(f"{ENDED}.click()")
        await page.until("document.querySelector('#detail .strip')")
        await page.run("document.querySelector('#explain').requestSubmit()")
        await page.until("document.querySelector('#explained table')")
        await page.run("document.querySelector('#diagnose').click()")
        await page.until("document.querySelector('#diagnosed h3')")
        await page.run("document.querySelector('#show-usage').click()")
        await page.until("document.querySelectorAll('#used table').length === 2")
        await page.run("document.querySelector('#keys-tenant').value = 'acme'")
        await page.run("document.querySelector('#keys-tenant').dispatchEvent(new Event('change'))")
        await page.until("document.querySelectorAll('#keys tbody tr').length === 3")
        await page.until("document.querySelectorAll('#versions tbody tr').length === 3")
        await page.run("document.querySelector('#versions [aria-label^=compare]').click()")
        await page.until("document.querySelector('#compared ul')")


@asynccontextmanager
async def everything(folder: Path) -> AsyncIterator[Everything]:
    """All that the dashboard can show, with a file and stores in `folder`."""
    file = folder / "sla.yaml"
    file.write_text(FILE.format(folder=folder))
    backends = (
        *(PacedBackend(f"own-{number}") for number in range(3)),
        PacedBackend("spot-0", pool="spot", latency=SLOW),
        PacedBackend("next-0", pool="next"),
    )
    started = ConfigFile(file, {name.upper(): key for name, key in KEYS.items()}).read()
    health = HealthRules(probe_every_s=0.05)
    router = Router(started.config, file=started, backends=listening(*backends), health=health, rng=random.Random(7))
    async with router, aiohttp.ClientSession() as http:
        assert await router.wait_until_reached(5)
        found = Everything(router, file, backends, http)
        async with asyncio.timeout(30):
            await found.settle()
        yield found
