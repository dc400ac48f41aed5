"""Keys and values in eight bits, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shards.kv.cache import QUANTISED, Extent, KvCache, LayeredViews
from shards.kv.keys import BLOCK_TOKENS
from shards.network.config import NetworkConfig

KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
"""Names of the types in which a network's KV can be stored; auto is the type that the network computes in."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def kv_dtype_of(name: str, *, computed: torch.dtype) -> torch.dtype:
    """The storage type of KV for the configured `name`, if the network computes in `computed`.

    float32, bfloat16 and float16 must equal `computed`, since attention does not mix types. Raises ValueError.
    """
    floating = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = {"auto": computed, **floating, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(name)
    if dtype is None:
        raise ValueError(f"kv_dtype is {name}; it must be one of {', '.join(KV_DTYPES)}")
    if dtype not in (computed, *QUANTISED):
        own = str(computed).removeprefix("torch.")
        raise ValueError(f"kv_dtype is {name} and the network computes in {own}; use auto, int8 or fp8")
    return dtype


def make_cache(config: NetworkConfig, blocks: int, *, dtype: torch.dtype, computed: torch.dtype) -> KvCache:
    """Memory for `blocks` blocks, with KV stored as `dtype` and read as `computed`."""
    if dtype in QUANTISED:
        return QuantisedKvCache(config, blocks, dtype=dtype, computed=computed)
    return KvCache(config, blocks, dtype=dtype)


class QuantisedKvCache(KvCache):
    """A `KvCache` that stores int8 or fp8 (e4m3) with one float32 scale for each token and head.

    `data` [layers, k|v, kv_heads, blocks * 64, head_dim], `scales` [layers, k|v, kv_heads, blocks * 64]. The scale is
    the largest magnitude among a head's numbers, divided by the largest of the type, so it depends on that token alone:
    not on its neighbours in the block or in the batch. The error of int8 is at most half a scale, that of fp8 1/16 of
    each number (and never above 2^-10 scales near 0). NaN and infinity are read back as NaN.

    One scale per token and head costs 4 bytes beside the 128 bytes of head_dim 128. One scale per block would depend on
    the rest of the block, which does not exist yet.
    """

    def __init__(
        self,
        config: NetworkConfig,
        blocks: int,
        *,
        dtype: torch.dtype = torch.int8,
        computed: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in QUANTISED:
            raise ValueError(f"quantised KV is int8 or float8_e4m3fn, not {dtype}")
        super().__init__(config, blocks, dtype=dtype)
        self.scales = torch.empty(self.data.shape[:-1])
        self._computed = computed
        self._largest = float(torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max)
        # torch cannot index float8 on the CPU, so its bytes are indexed as int8
        self._bytes = self.data.view(torch.int8)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the keys and values that `read` and `views` return."""
        return self._computed

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """Views [blocks, ...] of numbers and scales."""
        return (*super().planes, self.scales.view(*self.scales.shape[:3], -1, BLOCK_TOKENS).movedim(3, 0))

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Quantise keys and values [tokens, k|v * kv_heads, head_dim] and write them to `slots` [tokens] of `layer`."""
        by_head = keys_values.transpose(0, 1).float()
        scales = (by_head.abs().amax(-1) / self._largest).clamp_min(_SMALLEST_SCALE)
        scaled = by_head / scales.unsqueeze(-1)
        numbers = scaled.round_().to(torch.int8) if self.data.dtype == torch.int8 else scaled.to(self.data.dtype)
        self._bytes[layer].flatten(0, 1).index_copy_(1, slots, numbers.view(torch.int8))
        self.scales[layer].flatten(0, 1).index_copy_(1, slots, scales)

    def read(self, layer: int, extents: Sequence[Extent]) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, tokens, head_dim] of all `extents` in order, dequantised."""
        pieces = [self._dequantised(self.data[layer], self.scales[layer], extent) for extent in extents]
        both = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
        return both[0], both[-1]

    def views(self, extent: Extent) -> LayeredViews:
        """The extent in every layer, dequantised: a copy, unlike the views of the plain cache."""
        both = self._dequantised(self.data, self.scales, extent)
        return LayeredViews(both[:, 0].transpose(2, 3).unbind(0), both[:, -1].unbind(0))

    def _dequantised(self, numbers: Tensor, scales: Tensor, extent: Extent) -> Tensor:
        numbers = numbers.narrow(-2, extent.slot, extent.tokens).to(torch.float32)
        return numbers.mul_(scales.narrow(-1, extent.slot, extent.tokens).unsqueeze(-1)).to(self._computed)
