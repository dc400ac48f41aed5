"""What comes to a simulated router, and when. A prompt is a list of names of its beginnings, not its text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from policies.errors import InvalidRequest
from policies.sla.config import Config
from policies.suggest import did_you_mean

CHUNK_TOKENS = 512
"""What one name of a chunk stands for: the block of Mooncake's traces, and of the decision log."""

_UNSHARED = 2**32 - 1

_MOST_S = 10 * 365 * 86400.0
"""Between the first request and the last. Beyond it times are of another unit, and the clock would jump for ever."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes (seconds), who sends it, its prompt, and the answer that it gets if it gets one.

    `chunks` name its first chunks of CHUNK_TOKENS tokens each: prompts with equal names from the beginning on begin
    alike. What lies behind them is like no other prompt; `number` says which. A client would take an answer of up to
    `max_new_tokens`, and the model ends it after `new_tokens`. `line` is that of its file.
    """

    number: int
    at_s: float
    prompt_tokens: int
    new_tokens: int
    chunks: tuple[int, ...] = field(default=(), repr=False)
    tenant: str | None = None
    model: str | None = None
    priority: str | None = None
    session: str | None = None
    max_new_tokens: int | None = None
    deadline_s: float | None = None
    choices: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    line: int = 0

    def token_ids(self) -> bytes:
        """The prompt, little-endian uint32: each chunk is its name over and over."""
        whole = min(self.prompt_tokens, len(self.chunks) * CHUNK_TOKENS)
        rest = self.prompt_tokens - whole
        names = np.array([(name & 0xFFFFFFFF, (name >> 32) & 0xFFFFFFFF) for name in self.chunks], dtype="<u4")
        shared = np.tile(names.reshape(-1, 2), CHUNK_TOKENS // 2).reshape(-1)[:whole]
        own = np.tile(np.array((self.number, _UNSHARED), dtype="<u4"), rest // 2 + 1)[:rest]
        return shared.tobytes() + own.tobytes()


@dataclass(frozen=True, slots=True)
class Usual:
    """Who asks for what where a line does not say so: a tenant (None: whoever needs no key) and a model."""

    tenant: str | None
    model: str | None


def usual_of(config: Config, models: Sequence[str], *, tenant: str | None = None, model: str | None = None) -> Usual:
    """What lines without a tenant or model mean with `config`, whose pools serve `models`; given names go first.

    The anonymous tenant, or the only one; the only model. Raises InvalidRequest for a name that the file does not have.
    """
    if tenant is not None:
        _check_known(tenant, _tenants(config), what="tenant")
    elif config.anonymous is None and len(config.tenants) == 1:
        tenant = next(iter(config.tenants))
    if model is not None:
        _check_known(model, models, what="model")
    return Usual(tenant, model or (models[0] if len(models) == 1 else None))


def settled(arrival: Arrival, config: Config, models: Sequence[str], usual: Usual) -> Arrival:
    """`arrival` with its tenant and model, which `config` knows. Raises InvalidRequest naming what it does not know."""
    tenant, model = arrival.tenant or usual.tenant, arrival.model or usual.model
    if tenant is not None:
        _check_known(tenant, _tenants(config), what="tenant")
    elif config.anonymous is None:
        hint = f"add a field `tenant` to each line, or say --tenant: {_listed(config.tenants)}"
        raise InvalidRequest("nobody says who asks, and the file has several tenants", hint=hint)
    if model is None:
        hint = f"add a field `model` to each line, or say --model: {_listed(models)}"
        raise InvalidRequest("nobody says which model is asked for, and the file has several", hint=hint)
    _check_known(model, models, what="model")
    if arrival.priority is not None:
        _check_known(arrival.priority, config.classes, what="class")
    return replace(arrival, tenant=tenant, model=model)


def sped_up(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """`arrivals` at `speed` times their rate; the first one comes at 0. Raises InvalidRequest if one never would."""
    first_s = min((one.at_s for one in arrivals), default=0.0)
    last = max(arrivals, key=lambda one: one.at_s, default=None)
    if last is not None and last.at_s - first_s > _MOST_S * speed:
        after = f"the request in line {last.line} comes more than ten years after the first"
        raise InvalidRequest(after, hint="times in a trace are milliseconds; is --speed what you meant?")
    # to the microsecond, as logs are: a time of day has no more
    return [replace(one, at_s=round((one.at_s - first_s) / speed, 6)) for one in arrivals]


def _tenants(config: Config) -> list[str]:
    return list(dict.fromkeys([*config.tenants, *([config.anonymous.name] if config.anonymous else [])]))


def _check_known(name: str, known: Collection[str], *, what: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {_listed(known)}"
        raise InvalidRequest(f"there is no {what} '{name[:80]}'", hint=hint, param=what)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(islice(names, 12))
