"""A simulated engine speaks what our adapter for vLLM reads: streams, usage, metrics, cache events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import zmq
import zmq.asyncio
from tokenizers import Tokenizer

from backends.base import EventAddress
from backends.events.nouns import Batch, Removed, Stored
from backends.events.vllm import decode
from backends.vllm import VLLM, VLLMOptions
from policies.errors import ContextExceeded, InvalidRequest
from policies.nouns import Delta, Prompt
from simulation.speed import Machine
from simulation.vllm_server import Ports, VLLMServer, vllm_servers, write_tokenizer
from tests.backends.parts import a_request, everything, text_of
from tests.engines.programs import free_ports
from tests.shards.attached import eventually
from tests.simulation.scene import EVEN

MACHINE = Machine(EVEN, kv_tokens=32 * 64, running=4, context_tokens=1500, ranks=False, batch_tokens=512)


@dataclass
class Stage:
    """A server, and our adapter in front of it."""

    server: VLLMServer
    backend: VLLM
    ports: Ports

    async def ask(self, text: str, **fields: Any) -> list[Delta]:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 5, "stream": True}
        return await everything(self.backend, a_request(max_new_tokens=5), Prompt(body={**body, **fields}))

    async def published(self) -> list[Stored | Removed]:
        """All its cache events, as a feed asks for what it missed."""
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{self.ports.replay}")
            await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            events: list[Any] = []
            while True:
                _, number, payload = await dealer.recv_multipart()
                if number == b"\xff" * 8:
                    return events
                batch: Batch = decode(payload)
                events += batch.events


@asynccontextmanager
async def a_stage(pace: float = 500.0) -> AsyncIterator[Stage]:
    ports = Ports(*free_ports(3))
    async with vllm_servers([MACHINE], [ports], model="m", pace=pace) as (server,):
        clock = iter(float(second) for second in range(100)).__next__
        backend = VLLM("v", f"http://127.0.0.1:{ports.http}", pool="p", options=VLLMOptions(), clock=clock)
        try:
            yield Stage(server, backend, ports)
            server.driver.check()
        finally:
            await backend.close()


async def test_an_answer_is_streamed_and_counted() -> None:
    async with a_stage() as stage:
        deltas = await stage.ask("x" * 200)
    assert text_of(deltas) == "aaaaa"
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (200, 5)


async def test_a_prompt_that_came_before_is_found_in_the_cache_of_its_tenant_alone() -> None:
    async with a_stage() as stage:
        first, again = [await stage.ask("x" * 200) for _ in range(2)]
        other = await everything(
            stage.backend,
            a_request(domain="another"),
            Prompt(body={"model": "m", "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 5}),
        )
    cached = [deltas[-1].usage.cached_tokens for deltas in (first, again, other) if deltas[-1].usage]
    assert cached == [0, 192, 0]


async def test_a_probe_reads_models_load_and_where_events_are() -> None:
    async with a_stage() as stage:
        await stage.backend.probe()
        load, description = stage.backend.load(), stage.backend.describe()
        addresses = await stage.backend.event_addresses()
    assert (load.running, load.waiting, load.free_tokens) == (0, 0, MACHINE.kv_tokens)
    assert description.models == {"m"}
    assert description.context_tokens == MACHINE.context_tokens
    at = f"tcp://*:{stage.ports.events}", f"tcp://*:{stage.ports.replay}"
    assert addresses == (EventAddress(0, *at),)


async def test_the_load_has_the_requests_that_run_and_their_kv() -> None:
    # the answer would take 8 s
    async with a_stage(pace=1.0) as stage:
        asking = asyncio.create_task(stage.ask("x" * 700, max_tokens=800))
        await eventually(lambda: stage.server.engine.load().running == 1)
        await stage.backend.probe()
        load = stage.backend.load()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: not stage.server.engine.has_requests)
    assert load.running == 1
    assert load.free_tokens is not None
    assert load.free_tokens < MACHINE.kv_tokens


async def test_events_have_the_tokens_behind_their_parents_and_the_tenants_domain() -> None:
    text = "".join(chr(97 + at % 26) for at in range(200))
    async with a_stage() as stage:
        await stage.ask(text)
        await stage.ask(text[:128] + "." * 100)
        stored = [event for event in await stage.published() if isinstance(event, Stored)]
    first, branch = stored[0], next(event for event in stored if b"." in letters_of(event))
    assert letters_of(first) == text[:192].encode()
    assert (first.parent, first.salt, first.block_tokens) == (None, "d", 64)
    # it continues the second block of the first prompt
    assert branch.parent == first.hashes[1]
    assert letters_of(branch) == b"." * 64


async def test_blocks_that_were_evicted_are_reported() -> None:
    async with a_stage() as stage:
        for letter in "abcd":
            await stage.ask(letter * 1000)
        events = await stage.published()
    stored = {key for event in events if isinstance(event, Stored) for key in event.hashes}
    evicted = {key for event in events if isinstance(event, Removed) for key in event.hashes}
    assert evicted
    assert evicted < stored
    assert len(stored - evicted) <= MACHINE.blocks


async def test_requests_that_it_cannot_answer_are_refused_in_vllms_words() -> None:
    async with a_stage() as stage:
        with pytest.raises(ContextExceeded):
            await stage.ask("x" * 2000)
        with pytest.raises(InvalidRequest, match="has no `n`"):
            await stage.ask("x", n=2)
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{stage.ports.http}"
            async with http.post(f"{url}/v1/completions", data=b"{") as reply:
                assert reply.status == 400
            async with http.post(f"{url}/v1/completions", json={"model": "other", "prompt": "x"}) as reply:
                assert (reply.status, (await reply.json())["error"]["type"]) == (404, "NotFoundError")


async def test_a_text_in_one_piece_and_its_tokens() -> None:
    async with a_stage() as stage, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{stage.ports.http}"
        async with http.post(
            f"{url}/v1/completions", json={"model": "m", "prompt": [120] * 70, "max_tokens": 3}
        ) as reply:
            answer = await reply.json()
        async with http.post(f"{url}/tokenize", json={"model": "m", "prompt": "héx"}) as reply:
            tokens = (await reply.json())["tokens"]
    assert answer["choices"][0]["text"] == "aaa"
    assert answer["usage"]["prompt_tokens"] == 70
    assert tokens == list("héx".encode())


def test_the_tokenizer_of_its_folder_makes_a_token_of_each_byte(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json"} == {file.name for file in tmp_path.iterdir()}
    text = "Grüße, 世界!\n  two"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == list(text.encode())
    assert "chat_template" in json.loads((tmp_path / "tokenizer_config.json").read_text())


def letters_of(event: Stored) -> bytes:
    return np.frombuffer(event.token_ids, dtype="<u4").astype(np.uint8).tobytes()
