"""What a process of a shard is started for. Torch-free."""

from __future__ import annotations

from pathlib import Path

import msgspec


class PartJob(msgspec.Struct, frozen=True):
    """Part `rank` of `size` of the model at `path`, loaded like that of the first process, which waits at `port`. It
    has `whole_experts`, or a slice of each.

    Orders come through the socket with the descriptor `link`.
    """

    path: str
    dtype: str
    kv_dtype: str
    device: str
    threads: int
    rank: int
    size: int
    port: int
    link: int
    whole_experts: bool = True

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return Path(self.path)
