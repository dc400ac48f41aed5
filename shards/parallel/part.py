"""The share of a network that one of several processes holds. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shards.network.config import NetworkConfig
from shards.network.errors import UnsupportedCheckpoint

_MANY_GROUPS = 8
"""With so many groups for each part, one more or less hardly counts."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part `rank` of `size`: whole heads, a slice of each MLP, a slice of the vocabulary's head, and whole experts, or
    a slice of each.

    Heads that share a KV head stay together. If there are fewer KV heads than parts, several parts have the same one.
    """

    rank: int
    size: int
    whole_experts: bool = True

    def require(self, config: NetworkConfig) -> None:
        """Raise UnsupportedCheckpoint if the heads or the experts cannot be divided."""
        heads, kv_heads = config.heads, config.kv_heads

        def fits(size: int) -> bool:
            return not heads % size and (not kv_heads % size or not size % kv_heads)

        if not fits(self.size):
            fit = filter(fits, range(1, heads + 1))
            raise UnsupportedCheckpoint(
                f"{heads} attention heads with {kv_heads} KV heads cannot be divided among {self.size} processes",
                hint=f"set --tensor-parallel to one of {', '.join(map(str, fit))}",
            )
        experts = config.experts
        if not self.whole_experts and experts is None:
            raise UnsupportedCheckpoint(f"{config.architecture} has no experts", hint="leave out --experts")
        if self.whole_experts and experts is not None and experts.count < self.size:
            raise UnsupportedCheckpoint(
                f"{experts.count} experts are too few for {self.size} processes", hint="set --experts to divided"
            )

    def config(self, config: NetworkConfig) -> NetworkConfig:
        """The shape of this part; the vocabulary and the experts are those of the whole."""
        return replace(
            config,
            heads=len(self.heads(config)),
            kv_heads=len(self.kv_heads(config)),
            intermediate_size=len(self.slice(config.intermediate_size)),
        )

    def heads(self, config: NetworkConfig) -> range:
        """The numbers of its query heads."""
        return self.slice(config.heads)

    def kv_heads(self, config: NetworkConfig) -> range:
        """The numbers of its KV heads."""
        if config.kv_heads >= self.size:
            return self.slice(config.kv_heads)
        own = self.rank * config.kv_heads // self.size
        return range(own, own + 1)

    def experts(self, count: int) -> range:
        """The numbers of its experts of `count`, whole or a slice of each."""
        return self.slice(count) if self.whole_experts else range(count)

    def slice(self, count: int, *, group: int = 1) -> range:
        """Its share of `count` things in a row, of which `group` belong together. The shares of all parts differ by one
        at most; if there are many groups, they are whole ones, and differ by one group.
        """
        whole = count // group
        unit = group if whole >= _MANY_GROUPS * self.size else 1
        units = -(-count // unit)
        first, stop = self.rank * units // self.size, (self.rank + 1) * units // self.size
        return range(first * unit, min(stop * unit, count))

    def vocabulary(self, count: int) -> range:
        """Its logits of `count`: all parts but the last ones have equally many, as a gathering of them needs."""
        each = -(-count // self.size)
        return range(min(self.rank * each, count), min((self.rank + 1) * each, count))
