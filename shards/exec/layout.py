"""The layout of a network's KV in memory."""

from __future__ import annotations

from shards.exec.network import Network, WindowedNetwork
from shards.kv.window_layout import KvLayout, divide
from shards.options import EngineOptions


def kv_layout(network: Network, options: EngineOptions) -> KvLayout:
    """The layout of the KV of `network` in the memory of `options`. Raises ValueError if that holds no block."""
    blocks = options.blocks(network.block_bytes)
    window = network.window if isinstance(network, WindowedNetwork) else None
    if not options.divides(is_possible=window is not None) or window is None:
        return KvLayout(blocks)
    return divide(
        blocks,
        window,
        block_bytes=network.block_bytes,
        context_tokens=network.context_tokens,
        max_running=options.max_running,
        chunk_tokens=options.chunk_tokens,
        unit_tokens=options.unit_tokens,
    )


def allocate(network: Network, layout: KvLayout) -> None:
    """Allocate the memory of `layout`."""
    if layout.window is None:
        network.allocate(layout.blocks)
    else:
        assert isinstance(network, WindowedNetwork), "only such a network is divided"
        network.allocate_divided(layout.blocks, layout.pages)
