"""The group of a network's processes on torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

HOST = "127.0.0.1"
"""All processes of a shard are on one machine: neither their meeting point nor gloo listens to other ones."""

WAITS_S = 120.0
"""A process waits this long for the others: longer than kernels take to compile, which is where they drift apart."""


def meeting_point(size: int, *, waits_s: float = WAITS_S) -> TCPStore:
    """The store at which `size` processes meet; its `port` is a free one."""
    # a store that listens by itself does so for all machines, whatever its host
    with socket.create_server((HOST, 0)) as listening:
        port, waits = listening.getsockname()[1], timedelta(seconds=waits_s)
        store = TCPStore(HOST, port, size, True, waits, wait_for_workers=False, master_listen_fd=listening.fileno())
        # the descriptor is the store's from here on
        listening.detach()
        return store


def join(port: int, size: int, *, waits_s: float = WAITS_S) -> TCPStore:
    """The store of another process at `port`. Raises RuntimeError if there is none."""
    return TCPStore(HOST, port, size, False, timedelta(seconds=waits_s))


class Collectives:
    """A `Group` of the processes that meet at `store`.

    With `draws_everywhere` each process gets all logits and draws the same tokens from them, so that it knows them in
    the next step; else only the first one does.
    """

    def __init__(self, group: Any, rank: int, size: int, *, draws_everywhere: bool) -> None:
        self._group, self.rank, self.size, self._draws_everywhere = group, rank, size, draws_everywhere

    def __repr__(self) -> str:
        return f"Collectives({self.rank} of {self.size})"

    @classmethod
    def on(cls, device: str, store: Store, rank: int, size: int) -> Collectives:
        """Between processes that compute on `device`: cpu or cuda."""
        return (cls.nccl if device == "cuda" else cls.gloo)(store, rank, size)

    @classmethod
    def gloo(
        cls, store: Store, rank: int, size: int, *, draws_everywhere: bool = False, waits_s: float = WAITS_S
    ) -> Collectives:
        """Between processes that compute on CPUs. Raises RuntimeError if the others do not come."""
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=waits_s)
        return cls(dist.ProcessGroupGloo(store, rank, size, options), rank, size, draws_everywhere=draws_everywhere)

    @classmethod
    def nccl(cls, store: Store, rank: int, size: int, *, waits_s: float = WAITS_S) -> Collectives:
        """Between processes with one GPU each. NCCL ends a process that waits too long."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=waits_s)
        return cls(dist.ProcessGroupNCCL(store, rank, size, options), rank, size, draws_everywhere=True)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all processes' tensors, in `part` if it is in one piece."""
        part = part.contiguous()
        self._group.allreduce([part]).wait()
        return part

    def logits(self, part: Tensor, vocabulary: int, *, out: Tensor | None = None) -> Tensor:
        """All logits [rows, vocabulary]; `part` where no token is drawn."""
        part = part.contiguous()
        if self._draws_everywhere:
            stacked = part.new_empty((self.size * len(part), part.shape[1]))
            self._group._allgather_base(stacked, part).wait()
            parts = stacked.view(self.size, *part.shape)
        else:
            options = dist.GatherOptions()
            options.rootRank = 0
            parts = part.new_empty((self.size if self.rank == 0 else 0, *part.shape))
            self._group.gather([list(parts)] if self.rank == 0 else [], [part], options).wait()
            if self.rank:
                return part
        whole = parts.transpose(0, 1).reshape(len(part), -1)[:, :vocabulary]
        return whole.contiguous() if out is None else out.copy_(whole)
