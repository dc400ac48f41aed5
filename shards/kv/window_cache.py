"""The memory for keys and values on the CPU, if layers with a window have pages of their own."""

from __future__ import annotations

import torch

from shards.kv.quantised import make_cache
from shards.network.config import NetworkConfig


class WindowCache:
    """A `KvCache` of the layers without a window, by block, and one of the layers with a window, by page."""

    def __init__(
        self, config: NetworkConfig, blocks: int, pages: int, *, dtype: torch.dtype, computed: torch.dtype
    ) -> None:
        self.plain = make_cache(config.of_layers(windowed=False), blocks, dtype=dtype, computed=computed)
        self.windowed = make_cache(config.of_layers(windowed=True), pages, dtype=dtype, computed=computed)

    def __repr__(self) -> str:
        return f"WindowCache({self.plain!r}, {self.windowed!r})"
