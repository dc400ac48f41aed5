"""The copier between device and host memory, for networks that have host memory."""

from __future__ import annotations

from collections.abc import Callable

from shards.exec.network import HostedNetwork, Network
from shards.kv.copier import BlockMemory, Copier
from shards.shortage import gib, memory_for


def host_copier(network: Network, host_bytes: int, copier_of: Callable[[BlockMemory], Copier]) -> Copier | None:
    """A copier for as many blocks of `network` as `host_bytes` hold; None if they hold none.

    Raises ValueError for a network with KV that cannot be moved, NotEnoughMemory if the system has too little.
    """
    slots = host_bytes // network.block_bytes
    if not slots:
        return None
    if not isinstance(network, HostedNetwork):
        raise ValueError(f"host_bytes is {host_bytes}; this model's KV cannot be moved to the host")
    with memory_for(f"{gib(host_bytes)} of KV on the host", hint="give the host tier less"):
        return copier_of(network.host_memory(slots))
