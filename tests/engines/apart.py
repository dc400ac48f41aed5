"""Real vLLM that compute prompts apart from answers, and a router that sends every long prompt through both legs."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import aiohttp

import policies.prefill
from policies.nouns import BackendView, PrefillLeg, Request
from policies.sla.config import Config
from policies.sla.parse import parse
from router.start.app import Router
from shards.bundled import NAME
from shards.bundled.documents import prompt
from tests.engines.programs import ENGINES, VLLM, VLLMOptions
from tests.engines.routed import KEY, Client, a_document
from tests.shards.attached import eventually

SLA = """
classes: {{chat: {{}}}}
tenants: {{acme: {{keys: ["{key}"]}}}}
pools:
  answers: {{kind: vllm, at: {answers}, model: {model}, prefill: prompts, health: {health}}}
  prompts: {{kind: vllm, at: ["{prompts}"], model: {model}, health: {health}}}
rules: [{{class: chat, pools: [answers]}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""
LEASE_S = 120
"""Seconds that an engine keeps KV for another one, which extends them by heartbeats.

With 12 s leases ended on a busy machine, where transfers and heartbeats took longer. vLLM then uses the memory for
other prompts, the last block of a prompt first, and does not refuse to have it fetched: it logs "Potentially invalid
KV blocks", counts that, and the other engine answers nonsense. The router has no part in it: seen with two
engines alone, too.
"""
SHORT = 100
"""Prompts of fewer tokens are not transferred."""


def is_there() -> bool:
    """Is NIXL, which moves KV between engines, among the programs?"""
    return bool(list(ENGINES.glob("lib/python*/site-packages/nixl*")))


def nixl(port: int) -> VLLMOptions:
    """The options of a vLLM that gives and fetches KV; it tells others on `port` where its blocks are."""
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp,shm,self",
        "UCX_NET_DEVICES": "lo",
    }
    words = ("--kv-transfer-config", json.dumps(config))
    return VLLMOptions(events=False, extra=words, environment=tuple(environment.items()))


def file_of(prompts: VLLM, answers: Sequence[VLLM], **health: str) -> Config:
    """A file with the two pools; their `health` may take longer to answer than on a machine of their own."""
    key = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    patient = {"probe_timeout": "15s", "suspect_after": "15s", **health}
    urls = json.dumps([each.url for each in answers])
    return parse(SLA.format(key=key, answers=urls, prompts=prompts.url, model=NAME, health=json.dumps(patient)))


def _always(
    request: Request, chosen: BackendView, backends: tuple[BackendView, ...], avoiding: Collection[str] = ()
) -> PrefillLeg | None:
    if chosen.prefill is None or not request.may_transfer or request.prompt_tokens < SHORT:
        return None
    well = [
        backend
        for backend in backends
        if backend.pool == chosen.prefill and backend.healthy and backend.name not in avoiding
    ]
    return PrefillLeg(well[0].name, 0.5, 1.0) if well else None


@contextmanager
def always_apart() -> Iterator[None]:
    """As if every transfer paid: the bundled model computes a prompt faster than its KV arrives."""
    usual = policies.prefill.prefill_leg
    policies.prefill.prefill_leg = _always  # type: ignore[assignment]
    try:
        yield
    finally:
        policies.prefill.prefill_leg = usual


@asynccontextmanager
async def a_router(config: Config) -> AsyncIterator[tuple[Client, Router]]:
    """A router with all backends of `config` in use that sends every long prompt through both legs, and a client."""
    with always_apart():
        async with Router(config) as router, aiohttp.ClientSession() as http:
            cluster = router.gateway.cluster
            await eventually(lambda: not any(map(cluster.trouble, cluster.names())), within_s=60)
            yield Client(http, router.http_url), router


def a_question(number: int, tokens: int = 400) -> str:
    """A question about a document of its own of about so many tokens."""
    about = a_document(number, tokens)
    return prompt(about.text, about.questions[0].question)


def warmed(engine: VLLM) -> None:
    """Its first request compiles what the others use."""
    body = json.dumps({"model": NAME, "prompt": "Hello", "max_tokens": 2}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{engine.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200
