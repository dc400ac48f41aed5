"""Descriptions of simulated backends: the model's speed there, KV, and scheduling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from policies.errors import ConfigError
from policies.quantities import read_count, read_number, read_tokens, read_yes
from policies.shapes import Key, Named, Table
from policies.sla.config import Config
from policies.sla.fields import Field, Problems, Section
from policies.sla.yaml_positions import read_yaml
from shards.kv.keys import BLOCK_TOKENS
from shards.options import EngineOptions
from shards.sched.cost import StepShape

_FOR_EVER = 1e6


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one step of the engine = `step_s` + `token_s` for each token of a prompt + `pair_s` for each position
    that such a token attends to + `sequence_s` for each sequence that decodes + `context_s` for each position of their
    contexts. A prompt takes `way_s` to reach the engine.

    The defaults are Llama-3.1-8B in bfloat16 on one H200, from its rooflines: the weights once a step, 450 TFLOP/s of
    attention, 4.3 TB/s of memory.
    """

    way_s: float = 0.0
    step_s: float = 15.0e9 / 4.3e12
    token_s: float = 17.7e-6
    pair_s: float = 1.17e-9
    sequence_s: float = 0.0
    context_s: float = 131072 / 4.3e12

    def times(self, factor: float) -> Speed:
        """The speed at which each step takes `factor` times as long."""
        return Speed(
            self.way_s,
            factor * self.step_s,
            factor * self.token_s,
            factor * self.pair_s,
            factor * self.sequence_s,
            factor * self.context_s,
        )

    def seconds(self, shape: StepShape, *, decoding: int) -> float:
        """Duration of a step of this `shape` in which `decoding` sequences decode."""
        prefill = self.token_s * (shape.tokens - decoding) + self.pair_s * shape.pairs
        return self.step_s + prefill + self.sequence_s * decoding + self.context_s * shape.decode_context


@dataclass(frozen=True, slots=True)
class Machine:
    """One backend of a pool: speed, KV, and scheduling.

    `ranks`: it plans as our shards do (time for each step, lanes, ranks, preemption); otherwise first come, first
    served with `batch_tokens` of prompts in a step. `tells_load` and `tells_cache`: it reports after each step.

    It exchanges KV of `token_bytes` for each token with other backends of its model, at `link_bytes_s` in each
    direction and `link_s` for each transfer; 0 bytes per second: with none.
    """

    speed: Speed = Speed()
    kv_tokens: int = 896_000
    running: int = 64
    context_tokens: int = 131_072
    step_budget_s: float = 0.05
    batch_tokens: int = 8192
    ranks: bool = True
    tells_load: bool = True
    tells_cache: bool = True
    link_bytes_s: float = 0.0
    link_s: float = 0.005
    token_bytes: int = 131_072

    @property
    def blocks(self) -> int:
        """Number of its KV blocks."""
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def options(self) -> EngineOptions:
        """The options of its engine."""
        if self.ranks:
            return EngineOptions(max_running=self.running, step_s=self.step_budget_s)
        return EngineOptions(
            max_running=self.running,
            max_waiting=2**20,
            step_s=_FOR_EVER,
            lanes=1,
            chunk_tokens=self.batch_tokens,
            batch_tokens=self.batch_tokens,
        )


OTHERS = Machine(ranks=False, tells_load=False, tells_cache=False)
"""A backend that is not one of our shards, without a profile: a server that reports nothing."""

_MS, _US, _NS = 1e-3, 1e-6, 1e-9
_GB, _KIB = 1e9, 1024
_SPEEDS = {
    "way_ms": ("way_s", _MS, "time of a prompt on its way, before the engine has it"),
    "step_ms": ("step_s", _MS, "time of a step, whatever is in it: the weights are read once"),
    "token_us": ("token_s", _US, "time of each token of a prompt that is computed"),
    "pair_ns": ("pair_s", _NS, "time of each position that such a token attends to"),
    "sequence_us": ("sequence_s", _US, "time of each sequence that decodes, in each step"),
    "context_ns": ("context_s", _NS, "time of each position of such a sequence's context, in each step"),
}
"""Name of a coefficient in the file -> the field of Speed, its unit in seconds, and its meaning."""

MACHINE = Table(
    {
        **{name: Key(read_number, says) for name, (_, _, says) in _SPEEDS.items()},
        "kv_tokens": Key(read_tokens, "how many tokens of KV one backend holds; 896k without it"),
        "running": Key(read_count, "how many requests it runs at once; 64 without it"),
        "context_tokens": Key(read_tokens, "the longest prompt with its answer; 131072 without it"),
        "step_budget_ms": Key(read_number, "how long a step of our shards should take; 50 without it"),
        "batch_tokens": Key(read_count, "tokens of prompts in one step of other engines; 8192 without it"),
        "link_gb_s": Key(read_number, "speed of its network for KV in GB/s; without it, KV is not exchanged"),
        "link_ms": Key(read_number, "time of each transfer of KV, beside that of its bytes; 5 without it"),
        "token_kib": Key(read_number, "KV of one token; 128 without it, an 8B model in 16 bits"),
        "tells_load": Key(read_yes, "true: it reports what it has to do; our shards always do"),
        "tells_cache": Key(read_yes, "true: it tells what its cache holds; our shards always do"),
    }
)
PROFILE = Named(MACHINE)


def read_profile(path: Path, config: Config) -> dict[str, Machine]:
    """Pool -> machine, as the YAML file at `path` describes it; without the pools that the file leaves out.

    Raises ConfigError with every mistake, as for an SLA file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    root, found = read_yaml(text)
    problems = Problems(str(path), found)
    machines: dict[str, Machine] = {}
    for name, entry in Field(root, "", problems).named_entries().items():
        if name not in config.pools:
            entry.complain_of_name(name, config.pools, what="pool in the SLA file")
            continue
        machines[name] = _machine(entry, usual_machine(config, name))
    if lines := problems.lines():
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise ConfigError(f"{path} has {count}:", problems=lines)
    return machines


def usual_machine(config: Config, pool: str) -> Machine:
    """The machine of `pool` without a profile."""
    return Machine() if config.pools[pool].kind == "shard" else OTHERS


def machines_of(config: Config, profile: Mapping[str, Machine]) -> dict[str, Machine]:
    """Every pool of `config` with its machine."""
    return {name: profile.get(name) or usual_machine(config, name) for name in config.pools}


def _machine(field: Field, usual: Machine) -> Machine:
    section = field.section(MACHINE)
    speed = replace(usual.speed, **dict(_coefficients(section)))
    machine = replace(
        usual,
        speed=speed,
        kv_tokens=section.read("kv_tokens", usual.kv_tokens),
        running=section.read("running", usual.running),
        context_tokens=section.read("context_tokens", usual.context_tokens),
        step_budget_s=section.read("step_budget_ms", usual.step_budget_s / _MS) * _MS,
        batch_tokens=section.read("batch_tokens", usual.batch_tokens),
        tells_load=usual.ranks or section.read("tells_load", usual.tells_load),
        tells_cache=usual.ranks or section.read("tells_cache", usual.tells_cache),
        link_bytes_s=section.read("link_gb_s", usual.link_bytes_s / _GB) * _GB,
        link_s=section.read("link_ms", usual.link_s / _MS) * _MS,
        token_bytes=round(section.read("token_kib", usual.token_bytes / _KIB) * _KIB),
    )
    if not speed.step_s + speed.token_s > 0:
        field.complain("takes no time (give step_ms or token_us a value above zero)")
    if machine.blocks < 1:
        field.find("kv_tokens").complain(f"is less than one block of {BLOCK_TOKENS} tokens")
    if not machine.step_budget_s > 0:
        field.find("step_budget_ms").complain("must be above zero")
    return machine


def _coefficients(section: Section) -> list[tuple[str, float]]:
    return [(name, section.read(key, 0.0) * unit) for key, (name, unit, _) in _SPEEDS.items() if key in section]
