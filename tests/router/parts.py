"""Parts of tests of the router: a scripted backend, a small config, a small tokenizer, a running router."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Unpack

import aiohttp
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from backends.base import Description, Load
from policies.catalogue import builtin_catalogue
from policies.errors import BackendFailed
from policies.health import HealthRules
from policies.nouns import DIALECTS, Capability, Delta, Limits, Prompt, Request, ServiceClass, Tenant, Usage
from policies.rules import Rule
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from policies.sla.server import ServerSettings
from router.call.tracing import Tracing
from router.fleet.cluster.listener import ClusterListener
from router.later import Later
from router.operate.dashboard.board import Board
from router.operate.operations import Operations
from router.start.app import Router
from router.start.build import Parts, build

MODEL = "tiny"
KEY = "acme-key"
CONTEXT_TOKENS = 4096

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def a_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@cache
def some_assets() -> Mapping[str, bytes]:
    settings = {"bos_token": "<s>", "chat_template": TEMPLATE}
    return {"tokenizer.json": a_tokenizer().to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


Step = Delta | BaseException | asyncio.Event
"""A piece of the answer, a failure, or something to wait for."""


def built(config: Config, **parts: Unpack[Parts]) -> Operations:
    """The parts of a router that counts and learns at once, so that a test sees it at the end of each call."""
    return build(config, **{"later": Later(after_s=None), **parts})  # type: ignore[typeddict-item]


def board_of(router: Router) -> Board:
    """The board, with all that ended so far."""
    router.gateway.later.flush()
    return router.operations.board


def an_answer(*texts: str, usage: Usage | None = None) -> list[Step]:
    """The steps of an answer that ends well."""
    pieces: list[Step] = [Delta(text=text, token_ids=(number,)) for number, text in enumerate(texts)]
    return [*pieces, Delta(finish_reason="stop", usage=usage or Usage(7, len(texts), 3))]


@dataclass
class ScriptedBackend:
    """Answers each request with the next script, or with "ok"; says what it saw."""

    name: str = "b0"
    pool: str = "own"
    kind: str = "fake"
    address: str = "b0.test:8000"
    scripts: list[list[Step]] = field(default_factory=list)
    speaks_tokens: bool = True
    well: bool = True
    context_tokens: int | None = CONTEXT_TOKENS
    model: str = MODEL
    prompts: list[Prompt] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    capabilities: frozenset[Capability] = (
        frozenset(Capability)
        - DIALECTS
        - {
            *(Capability.STRUCTURED_OUTPUT, Capability.PINS, Capability.SUFFIX, Capability.PROMPT_LOGPROBS),
        }
    )
    open: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def describe(self) -> Description | None:
        models = frozenset({self.model})
        if not self.well:
            return None
        speaks, able = self.speaks_tokens, self.capabilities
        return Description(models, self.context_tokens, speaks_tokens=speaks, capabilities=able)

    def load(self) -> Load:
        return Load()

    async def start(self) -> None:
        pass

    async def probe(self) -> None:
        if not self.well:
            raise BackendFailed(f"{self.name} is away")

    async def generate(self, request: Request, prompt: Prompt) -> AsyncIterator[Delta]:
        self.requests.append(request)
        self.prompts.append(prompt)
        steps = self.scripts.pop(0) if self.scripts else an_answer("o", "k")
        self.open += 1
        try:
            for step in steps:
                self.began.set()
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        finally:
            self.open -= 1

    def assets(self) -> Mapping[str, bytes]:
        return some_assets() if self.speaks_tokens else {}

    async def close(self) -> None:
        assert self.open == 0, f"{self.open} requests still run at {self.name}"


def series(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """Labels -> value, of the samples that are called `pointsman_<name>`."""
    samples = (sample for family in registry.collect() for sample in family.samples)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == f"pointsman_{name}"}


class Heard(ClusterListener):
    """Calls what it was given, by the name of what happened: `Heard(gone=names.append)`."""

    def __init__(self, **calls: Callable[..., object]) -> None:
        for name, call in calls.items():
            assert hasattr(ClusterListener, name), f"nothing is called {name}"
            setattr(self, name, call)


def a_tenant(name: str = "acme", key: str | None = KEY, **fields: Any) -> Tenant:
    hashes = frozenset() if key is None else frozenset({hashlib.sha256(key.encode()).hexdigest()})
    limits = Limits(concurrent=fields.pop("concurrent", None))
    return Tenant(name=name, **{"domain": name, "key_hashes": hashes, "limits": limits, **fields})


def a_config(*tenants: Tenant, anonymous: Tenant | None = None, **server: Any) -> Config:
    tenants = tenants or (a_tenant(),)
    return Config(
        classes={"chat": ServiceClass("chat", 0), "batch": ServiceClass("batch", 1)},
        tenants={tenant.name: tenant for tenant in tenants},
        rules=(Rule("chat"),),
        policies=builtin_catalogue().policies,
        pools={"own": PoolSpec("own", kind="fake", model=MODEL)},
        server=ServerSettings(**{"http": "127.0.0.1:0", "grpc": None, "drain_s": 5.0, **server}),
        version="1",
        tenant_by_key_hash={digest: tenant for tenant in tenants for digest in tenant.key_hashes},
        anonymous=anonymous,
    )


@asynccontextmanager
async def a_router(
    *backends: ScriptedBackend,
    config: Config | None = None,
    clock: Callable[[], float] | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[Router]:
    """A running router with its backends reached; checks at the end that nothing is left."""
    made: Sequence[ScriptedBackend] = backends or (ScriptedBackend(),)
    chosen: dict[str, Any] = {"clock": clock, "tracing": tracing}
    parts = {name: part for name, part in chosen.items() if part is not None}
    router = Router(config or a_config(), backends=lambda _: made, health=HealthRules(probe_every_s=0.02), **parts)
    async with router:
        if any(backend.well for backend in made):
            assert await router.wait_until_reached(5)
        yield router
        assert await router.gateway.doors.emptied(5)
        router.check()


@dataclass(frozen=True)
class Client:
    """Speaks plain HTTP to a router."""

    session: aiohttp.ClientSession
    url: str

    def post(self, path: str, body: Any = None, *, key: str | None = KEY, **options: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers |= options.pop("headers", {})
        if "data" not in options:
            options["data"] = json.dumps(body)
        return self.session.post(self.url + path, headers=headers, **options)

    def get(self, path: str, key: str | None = KEY) -> Any:
        return self.session.get(self.url + path, headers={"authorization": f"Bearer {key}"} if key else {})

    async def answer(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        async with self.post(path, body, **options) as reply:
            return reply.status, await reply.json()


@asynccontextmanager
async def a_client(router: Router) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session, router.http_url)


def a_chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
