"""Which networks the GPU computes; the others run on the CPU. Torch-free."""

from __future__ import annotations

from shards.network.config import NetworkConfig
from shards.network.errors import UnsupportedCheckpoint


def require_gpu_support(config: NetworkConfig) -> None:
    """Raise UnsupportedCheckpoint if there are no kernels for a part of this network."""
    if config.latent is not None:
        raise UnsupportedCheckpoint(
            f"{config.architecture} has latent attention, which shards compute on CPUs only",
            hint="choose --device cpu, or serve it with another engine, in a pool of that engine's kind",
        )
