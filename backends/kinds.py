"""The catalogue: which kinds of backend there are, and how to make one."""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

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
from tls.certificates import Certificates

T = TypeVar("T")

GROUP = "pointsman.backends"
"""Entry points of other distributions: a kind's name, and a Kind or a class of HttpBackend."""

_IN_CODE_ONLY = ("tls", "error", "of_file")
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
    """Parts of the router that all its backends share. `on_load` gets the name of a backend that reported its load,
    `on_leaving` that of a Leaver that is about to stop.

    `listener` hears large snapshots of caches in pieces, in `turns`. `tls` has certificates for backends, by the
    name of their pool. `secrets` are those of the SLA file in force.
    """

    router: str = "router"
    listener: CacheListener | None = None
    on_load: Callable[[str], None] = lambda _: None
    on_leaving: Callable[[str], None] = lambda _: None
    turns: Turns = field(default_factory=Turns)
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
    tls: Mapping[str, Certificates] = field(default_factory=dict)
    secrets: Callable[[], frozenset[str]] = frozenset


Maker = Callable[[Place, Surroundings], Backend]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of backend: `make` returns a backend that is not started; `options` are the names and types of the options
    that the SLA file may give to it.
    """

    make: Maker
    options: Mapping[str, Any] = field(default_factory=dict)


def make(kind: str, place: Place, surroundings: Surroundings) -> Backend:
    """A backend of `kind`, not started. Raises ConfigError for an unknown kind or option, with a suggestion."""
    return kind_of(kind).make(place, surroundings)


def kind_of(name: str) -> Kind:
    """The kind `name`, of Pointsman or of an installed distribution.

    Raises ConfigError if there is none, or if its distribution cannot be loaded.
    """
    if name in KINDS:
        return KINDS[name]
    if name not in kind_names():
        raise ConfigError(f"there is no kind of backend {name!r}", hint=_hint(name, kind_names()))
    return _installed(name)


def kind_names() -> tuple[str, ...]:
    """The names of all kinds: those of Pointsman, then those of installed distributions, of which none is loaded.

    Raises ConfigError for a distribution that gives one of our names to a kind of its own.
    """
    points = entry_points(group=GROUP)
    for point in points:
        if point.name in KINDS:
            raise _refused(point, "Pointsman has a kind of this name")
    return (*KINDS, *sorted({point.name for point in points}))


@cache
def _installed(name: str) -> Kind:
    points = list(entry_points(group=GROUP, name=name))
    if len(points) > 1:
        raise _refused(points[0], f"{_distribution(points[1])} has a kind of this name too")
    return _loaded(points[0])


def _loaded(point: EntryPoint) -> Kind:
    try:
        found = point.load()
    except Exception as error:
        # code of another distribution may raise anything
        raise _refused(point, f"{type(error).__name__}: {error}") from error
    if isinstance(found, Kind):
        return found
    if isinstance(found, type) and issubclass(found, HttpBackend):
        if found.kind != point.name:
            raise _refused(point, f"{found.__name__}.kind is '{found.kind}', and its entry point '{point.name}'")
        return over_http(found)
    raise _refused(point, "it is neither a Kind nor a class of HttpBackend")


def _refused(point: EntryPoint, reason: str) -> ConfigError:
    message = f"the kind of backend '{point.name}' of {_distribution(point)} cannot be used: {reason}"
    return ConfigError(message, hint=f"fix or uninstall {point.dist.name}" if point.dist else "")


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def _make_shard(place: Place, surroundings: Surroundings) -> Backend:
    return ShardBackend(
        place.name,
        place.address,
        pool=place.pool,
        models=place.models,
        listener=surroundings.listener,
        on_load=surroundings.on_load,
        on_leaving=surroundings.on_leaving,
        turns=surroundings.turns,
        options=read_options(place, LinkOptions, router=surroundings.router, tls=surroundings.tls.get(place.pool)),
        clock=surroundings.clock,
        rng=surroundings.rng,
    )


def over_http(backend: type[HttpBackend]) -> Kind:
    """The kind of `backend`; its options are the fields of its `options_type`."""

    def make_one(place: Place, surroundings: Surroundings) -> Backend:
        certificates = surroundings.tls.get(place.pool)
        shared = {"tls": certificates, "of_file": surroundings.secrets}
        read = read_options(place, backend.options_type, key=place.key, models=place.models, **shared)
        return backend(place.name, place.address, pool=place.pool, options=read, clock=surroundings.clock)

    return Kind(make_one, _known(backend.options_type, {"key", "models"}))


def _make_fake(place: Place, surroundings: Surroundings) -> Backend:  # noqa: ARG001
    return FakeBackend(
        place.name,
        place.pool,
        script=read_options(place, Answer),
        models=frozenset(place.models) or frozenset({"fake"}),
    )


def read_options(place: Place, kind: type[T], **given: object) -> T:
    """The options of `place` as a `kind`, a dataclass, with the fields `given`. Text is read as numbers and booleans.

    Raises ConfigError for an unknown option or a malformed value.
    """
    known = _known(kind, given)
    try:
        read = {name: read_option(name, value, known) for name, value in place.options.items()}
    except ValueError as error:
        raise ConfigError(f"{place.pool}: {error}") from error
    return kind(**read, **given)


def read_option(name: str, value: object, known: Mapping[str, Any], *, also: Collection[str] = ()) -> Any:
    """`value` as the type that `known` has for the option `name`. Text is read as numbers and booleans where due.

    Raises ValueError with a sentence. `also` are names that are right too, for the question what was meant.
    """
    if name not in known:
        raise ValueError(f"there is no option '{name}' ({_hint(name, {*known, *also})})")
    try:
        return msgspec.convert(value, known[name], strict=False)
    except msgspec.ValidationError as error:
        given = value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple) else value
        raise ValueError(f"option '{name}' must be {_wanted(known[name]) or error}, not '{given}'") from error


def _wanted(hint: Any) -> str:
    """The name of this type of values in an error; empty if it is not a word or a number."""
    limits = {}
    if get_origin(hint) is Annotated:
        hint, meta = get_args(hint)
        limits = {"least": meta.ge, "most": meta.le}
    if get_origin(hint) is Literal:
        *most, last = get_args(hint)
        return f"{', '.join(most)} or {last}"
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "one text"}
    words = [kinds[kind] for kind in get_args(hint) or (hint,) if kind in kinds]
    bounds = [f"at {word} {limit:g}" for word, limit in limits.items() if limit is not None]
    return " and ".join([words[0] + (" of " + bounds[0] if bounds else ""), *bounds[1:]]) if words else ""


def _known(kind: type, given: Collection[str]) -> dict[str, Any]:
    hidden = {*given, *_IN_CODE_ONLY}
    return {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name not in hidden}


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


_OVER_HTTP: tuple[type[HttpBackend], ...] = (
    OpenAICompatible,
    VLLM,
    SGLang,
    TensorRTLLM,
    TGI,
    LMDeploy,
    Ollama,
    LlamaCpp,
    FastChat,
    TritonServer,
    Tabby,
    MLC,
    DeepSpeedMII,
    OpenAI,
    Azure,
    Anthropic,
)

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "shard": Kind(_make_shard, _known(LinkOptions, {"router"})),
        **{backend.kind: over_http(backend) for backend in _OVER_HTTP},
        "fake": Kind(_make_fake, _known(Answer, ())),
    }
)
"""The kinds that come with Pointsman, by name."""
