"""The matrices of a network that adapters may change, with the names that checkpoints have for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shards.network.config import NetworkConfig
from shards.network.families.table import family_of
from shards.network.family import TensorNames

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` up to `stop` of a matrix: one module of the checkpoint, or its only one.

    The first `turned` rows are stored in heads of `order`, where a checkpoint has another order; see `Rope.order`.
    """

    module: str
    start: int
    stop: int
    turned: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """A matrix called `name`, from `inputs` numbers to the rows of all `parts`."""

    name: str
    inputs: int
    parts: tuple[Part, ...]
    order: tuple[int, ...] | None = None
    head_dim: int = 0


def site_name(layer: int, matrix: str) -> str:
    """The name of a site: `matrix` is query_key_value, output, gate_up, down, shared_gate_up or shared_down."""
    return f"{layer}.{matrix}"


def sites_of(config: NetworkConfig) -> tuple[Site, ...]:
    """All matrices of the network of `config` that adapters may change: not its experts, and not latent attention."""
    family = family_of(config.architecture)
    names, found = family.names, list[Site]()
    for layer in range(config.layers):
        if family.attention is None:
            found += _attention(config, names, layer)
        has_experts = config.experts is not None and layer in config.experts.layers
        if not has_experts and family.mlp is None:
            found += _gated(
                layer, ("gate_up", "down"), (names.gate_up, names.down), config.intermediate_size, config.hidden_size
            )
        elif config.experts is not None and has_experts and config.experts.shared_inner:
            modules = tuple(f"{names.shared}{name}" for name in ("gate_proj", "up_proj")), f"{names.shared}down_proj"
            sides = ("shared_gate_up", "shared_down")
            found += _gated(layer, sides, modules, config.experts.shared_inner, config.hidden_size)
    if not config.tied_head:
        found.append(Site(HEAD, config.hidden_size, (Part(HEAD, 0, config.vocab_size),)))
    return tuple(found)


def _attention(config: NetworkConfig, names: TensorNames, layer: int) -> Iterator[Site]:
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    modules = [_module(layer, name) for name in names.query_key_value]
    widths = [query, key_value, key_value] if len(modules) == 3 else [query + 2 * key_value]
    turned = [query, key_value, 0] if len(modules) == 3 else [query + key_value]
    order = config.rope.order(config.head_dim)
    yield Site(
        site_name(layer, "query_key_value"),
        config.hidden_size,
        _parts(modules, widths, turned),
        None if order is None else tuple(order),
        config.head_dim,
    )
    output = Part(_module(layer, names.output), 0, config.hidden_size)
    yield Site(site_name(layer, "output"), query, (output,))


def _gated(
    layer: int, sides: tuple[str, str], modules: tuple[tuple[str, ...], str], inner: int, hidden: int
) -> Iterator[Site]:
    gate_up = [_module(layer, name) for name in modules[0]]
    width = 2 * inner // len(gate_up)
    yield Site(site_name(layer, sides[0]), hidden, _parts(gate_up, [width] * len(gate_up), [0] * len(gate_up)))
    yield Site(site_name(layer, sides[1]), inner, (Part(_module(layer, modules[1]), 0, hidden),))


def _module(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _parts(modules: list[str], widths: list[int], turned: list[int]) -> tuple[Part, ...]:
    starts = [sum(widths[:at]) for at in range(len(widths))]
    return tuple(
        Part(module, start, start + width, turns)
        for module, start, width, turns in zip(modules, starts, widths, turned, strict=True)
    )
