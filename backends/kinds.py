"""The catalogue: which kinds of backend there are, and how to make one."""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import msgspec

from backends.anthropic.backend import Anthropic
from backends.azure import Azure
from backends.base import Backend, CacheListener
from backends.deepspeed_mii import DeepSpeedMII
from backends.fake import Answer, FakeBackend
from backends.fastchat.backend import FastChat
from backends.http.backend import HttpBackend
from backends.llama_cpp.backend import LlamaCpp
from backends.lmdeploy import LMDeploy
from backends.mlc import MLC
from backends.ollama.backend import Ollama
from backends.openai.backend import OpenAI
from backends.openai.compatible import OpenAICompatible
from backends.sglang import SGLang
from backends.shard.backend import ShardBackend
from backends.shard.link import LinkOptions
from backends.shard.turns import Turns
from backends.tabby import Tabby
from backends.tensorrt_llm import TensorRTLLM
from backends.tgi.backend import TGI
from backends.triton.backend import TritonServer
from backends.vllm import VLLM
from policies.errors import ConfigError

T = TypeVar("T")

_IN_CODE_ONLY = ("credentials", "error")
"""Options that are objects and cannot stand in a file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which backend to make: names, `address`, the backend's own `key`, clients' names of `models` -> its own."""

    name: str
    pool: str
    address: str
    key: str | None = field(default=None, repr=False)
    models: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the router gives to all its backends. `on_load` is told the name of one that reported its load.

    `listener` hears large snapshots of caches in pieces, in `turns`.
    """

    router: str = "router"
    listener: CacheListener | None = None
    on_load: Callable[[str], None] = lambda _: None
    turns: Turns = field(default_factory=Turns)
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)


Maker = Callable[[Place, Surroundings], Backend]


def make(kind: str, place: Place, surroundings: Surroundings) -> Backend:
    """A backend of `kind`, not started. Raises ConfigError for an unknown kind or option, with what was meant."""
    maker = KINDS.get(kind)
    if maker is None:
        raise ConfigError(f"there is no kind of backend {kind!r}", hint=_hint(kind, KINDS))
    return maker(place, surroundings)


def _make_shard(place: Place, surroundings: Surroundings) -> Backend:
    return ShardBackend(
        place.name,
        place.address,
        pool=place.pool,
        models=place.models,
        listener=surroundings.listener,
        on_load=surroundings.on_load,
        turns=surroundings.turns,
        options=_options(place, LinkOptions, router=surroundings.router),
        clock=surroundings.clock,
        rng=surroundings.rng,
    )


def _over_http(backend: type[HttpBackend]) -> Maker:
    """What makes a `backend`, with its options from the file."""

    def make_one(place: Place, surroundings: Surroundings) -> Backend:
        read = _options(place, backend.options_type, key=place.key, models=place.models)
        return backend(place.name, place.address, pool=place.pool, options=read, clock=surroundings.clock)

    return make_one


def _make_fake(place: Place, surroundings: Surroundings) -> Backend:  # noqa: ARG001
    return FakeBackend(
        place.name,
        place.pool,
        script=_options(place, Answer),
        models=frozenset(place.models) or frozenset({"fake"}),
    )


KINDS: Mapping[str, Maker] = MappingProxyType(
    {
        "shard": _make_shard,
        "openai_compatible": _over_http(OpenAICompatible),
        "vllm": _over_http(VLLM),
        "sglang": _over_http(SGLang),
        "tensorrt_llm": _over_http(TensorRTLLM),
        "tgi": _over_http(TGI),
        "lmdeploy": _over_http(LMDeploy),
        "ollama": _over_http(Ollama),
        "llama_cpp": _over_http(LlamaCpp),
        "fastchat": _over_http(FastChat),
        "triton_server": _over_http(TritonServer),
        "tabby": _over_http(Tabby),
        "mlc": _over_http(MLC),
        "deepspeed_mii": _over_http(DeepSpeedMII),
        "openai": _over_http(OpenAI),
        "azure": _over_http(Azure),
        "anthropic": _over_http(Anthropic),
        "fake": _make_fake,
    }
)
"""Kind -> what makes one."""


def _options(place: Place, kind: type[T], **given: object) -> T:
    """The options of `place` as a `kind`, beside what is `given`. Text is read as numbers and booleans where due."""
    allowed = {name: hint for name, hint in get_type_hints(kind).items() if name not in {*given, *_IN_CODE_ONLY}}
    read: dict[str, object] = {}
    for name, value in place.options.items():
        if name not in allowed:
            raise ConfigError(f"{place.pool}: there is no option {name!r}", hint=_hint(name, allowed))
        try:
            read[name] = msgspec.convert(value, allowed[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{place.pool}: option {name!r} is {value!r}", hint=str(error)) from error
    return kind(**read, **given)


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
