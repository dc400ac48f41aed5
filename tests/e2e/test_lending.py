"""`pointsman up`: a shard that is restarted or drained leaves its documents to the other one."""

from __future__ import annotations

import os
import random
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from policies.sla.parse import default_config, parse
from router.start.app import Router
from router.start.commands.lending import lending_flags, secret_of_a_run
from router.start.commands.local_shards import LocalShards
from router.start.commands.overrides import listening
from router.start.commands.up import commands, with_addresses
from shards.bundled.documents import document, facts_within, prompt
from tests.e2e.cluster import MODEL
from tests.shards.attached import eventually


class Reply(NamedTuple):
    text: str
    backend: str
    cached_tokens: int


async def ask(router: Router, text: str) -> Reply:
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="any", max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=32
        )
    body = raw.parse()
    assert body.usage is not None
    assert body.usage.prompt_tokens_details is not None
    cached = body.usage.prompt_tokens_details.cached_tokens or 0
    return Reply(body.choices[0].message.content or "", raw.headers["x-pointsman-backend"], cached)


@pytest.mark.timeout(400)  # two shards load, on a machine that may be busy
async def test_the_document_of_a_shard_that_drains_or_ends_is_cached_at_the_other() -> None:
    config = listening(default_config(local=2), "127.0.0.1:0", "off", "off")
    with secret_of_a_run() as secret:
        async with AsyncExitStack() as stack:
            shards = await stack.enter_async_context(LocalShards(list(commands(config, secret))))
            router = await stack.enter_async_context(Router(with_addresses(config, shards.addresses)))
            assert await router.wait_until_reached(60)
            paper = document(random.Random(7), facts_within(1_800))
            first, second, third = (prompt(paper.text, each.question) for each in paper.questions[:3])
            before = await ask(router, first)
            assert before.cached_tokens == 0
            # one that drains lends its blocks
            cluster = router.gateway.cluster
            await eventually(lambda: len(cluster.lenders) == 2, within_s=20)
            cluster.drain(before.backend)
            lent = await ask(router, second)
            assert lent.backend != before.backend
            assert lent.cached_tokens > 800
            assert paper.questions[1].needle in lent.text
            # one that ends hands them over
            cluster.drain(before.backend, draining=False)
            (holder,) = (each for each in shards.shards if each.command.name == lent.backend)
            assert holder.pid is not None
            os.kill(holder.pid, signal.SIGTERM)
            await eventually(lambda: cluster.is_ill(lent.backend), within_s=60)
            last = await ask(router, third)
            assert last.backend == before.backend
            assert last.cached_tokens > 800
            assert paper.questions[2].needle in last.text


@pytest.mark.parametrize(
    ("pool", "lends"),
    [
        ("local: 2", True),
        ("local: 1", False),
        ("local: 2, options: {kv-memory: 1}", True),
        ("local: 2, options: {kv-listen: '127.0.0.1:0'}", False),
        ("local: 2, options: {tensor-parallel: 2}", False),
        ("local: 2, options: {window-kv: auto}", False),
    ],
)
def test_shards_lend_if_the_file_does_not_say_how(pool: str, lends: bool) -> None:
    spec = parse(f"pools: {{own: {{kind: shard, model: bundled, {pool}}}}}").pools["own"]
    flags = ("--kv-listen", "127.0.0.1:0", "--kv-secret-file", "/s") if lends else ()
    assert lending_flags(spec, Path("/s")) == flags


def test_the_secret_is_another_one_each_time_for_this_user_alone_and_gone_at_the_end() -> None:
    with secret_of_a_run() as first, secret_of_a_run() as second:
        assert first.read_text() != second.read_text()
        assert (first.stat().st_mode & 0o777, first.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not first.exists()
    assert not first.parent.exists()
