"""The requests of a simulation and their times. A prompt is a list of names for its chunks, not its text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from policies.errors import InvalidRequest
from policies.sla.config import Config
from policies.suggest import did_you_mean

CHUNK_TOKENS = 512
"""Tokens of one named chunk: the block of Mooncake's traces, and of the decision log."""

MOST_TOKENS = 100_000_000
"""Tokens of a prompt in a trace, at most. A larger number is a mistake, and its prompt would fill the memory."""

_UNSHARED = 2**32 - 1

_MOST_S = 10 * 365 * 86400.0
"""Most seconds between first and last request. Longer times are probably in another unit, and would run for ever."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: its time (seconds), tenant, prompt, and the answer that it gets unless it is rejected.

    `chunks` name its first chunks of CHUNK_TOKENS tokens each: prompts with equal leading names have equal
    beginnings. The rest is unlike any other prompt, by its `number`. The client asks for at most
    `max_new_tokens`, and the model ends the answer after `new_tokens`. `line` is its line in the file.
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
        """The prompt, little-endian uint32: each chunk repeats its name."""
        whole = min(self.prompt_tokens, len(self.chunks) * CHUNK_TOKENS)
        rest = self.prompt_tokens - whole
        names = np.array([(name & 0xFFFFFFFF, (name >> 32) & 0xFFFFFFFF) for name in self.chunks], dtype="<u4")
        shared = np.tile(names.reshape(-1, 2), CHUNK_TOKENS // 2).reshape(-1)[:whole]
        own = np.tile(np.array((self.number, _UNSHARED), dtype="<u4"), rest // 2 + 1)[:rest]
        return shared.tobytes() + own.tobytes()


@dataclass(frozen=True, slots=True)
class Usual:
    """Defaults for lines without them: a tenant (None: the anonymous tenant) and a model."""

    tenant: str | None
    model: str | None


def usual_of(config: Config, models: Sequence[str], *, tenant: str | None = None, model: str | None = None) -> Usual:
    """The defaults for lines without a tenant or model. Given names come first.

    Otherwise the anonymous tenant, or the only one; the only one of `models`. Raises InvalidRequest for unknown names.
    """
    if tenant is not None:
        _check_known(tenant, _tenants(config), what="tenant")
    elif config.anonymous is None and len(config.tenants) == 1:
        tenant = next(iter(config.tenants))
    if model is not None:
        _check_known(model, models, what="model")
    return Usual(tenant, model or (models[0] if len(models) == 1 else None))


def settled(arrival: Arrival, config: Config, models: Sequence[str], usual: Usual) -> Arrival:
    """`arrival` with its tenant and model, which `config` knows. Raises InvalidRequest that names an unknown one."""
    tenant, model = arrival.tenant or usual.tenant, arrival.model or usual.model
    if tenant is not None:
        _check_known(tenant, _tenants(config), what="tenant")
    elif config.anonymous is None:
        hint = f"add a field `tenant` to each line, or use --tenant: {_listed(config.tenants)}"
        raise InvalidRequest("the line names no tenant, and the file has several", hint=hint)
    if model is None:
        hint = f"add a field `model` to each line, or use --model: {_listed(models)}"
        raise InvalidRequest("the line names no model, and the file has several", hint=hint)
    _check_known(model, models, what="model")
    if arrival.priority is not None:
        _check_known(arrival.priority, config.classes, what="class")
    return replace(arrival, tenant=tenant, model=model)


def sped_up(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """`arrivals` at `speed` times their rate; the first one is at 0. Raises InvalidRequest if one would be too late."""
    first_s = min((arrival.at_s for arrival in arrivals), default=0.0)
    last = max(arrivals, key=lambda arrival: arrival.at_s, default=None)
    if last is not None and last.at_s - first_s > _MOST_S * speed:
        after = f"the request in line {last.line} is more than ten years after the first"
        raise InvalidRequest(after, hint="times in a trace are milliseconds; check --speed too")
    # to the microsecond, like logs: Unix time as a float has no more
    return [replace(arrival, at_s=round((arrival.at_s - first_s) / speed, 6)) for arrival in arrivals]


def _tenants(config: Config) -> list[str]:
    return list(dict.fromkeys([*config.tenants, *([config.anonymous.name] if config.anonymous else [])]))


def _check_known(name: str, known: Collection[str], *, what: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {_listed(known)}"
        raise InvalidRequest(f"there is no {what} '{name[:80]}'", hint=hint, param=what)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(islice(names, 12))
