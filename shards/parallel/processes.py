"""Starts the other processes of a shard, and watches them."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from shards.logs import tell
from shards.parallel.collectives import WAITS_S, Collectives, meeting_point
from shards.parallel.followers import Followers
from shards.parallel.job import PartJob
from shards.parallel.link import PartLink

if TYPE_CHECKING:
    from shards.model import Model
    from shards.weight_files import WeightFiles

_LOOKS_EVERY_S = 1.0

_ENDING_S = 10.0
"""A process that is told to end gets this long; and so does this one, to end streams after it lost another."""

EXIT_STATUS = 2

log = logging.getLogger(__name__)


class PartProcesses:
    """`size - 1` processes with the other parts of a model, and the `group` that this one forms with them.

    They end with this process, however that ends. If one of them ends first, or does not come back from a step, `watch`
    has the engine end; if that does not help, because this process hangs in a call too, `abort` ends it at once.
    """

    def __init__(
        self,
        path: str,
        *,
        size: int,
        dtype: str,
        kv_dtype: str,
        device: str,
        threads: int,
        whole_experts: bool = True,
        abort: Callable[[int], object] = os._exit,
    ) -> None:
        visible = gpus(size) if device == "cuda" else []
        # NCCL, too, listens to no other machine, unless it is told to
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self._abort = abort
        self._on_lost: Callable[[str], None] = lambda _: None
        self._lost = ""
        self._is_told = threading.Lock()
        self._closed = threading.Event()
        store = meeting_point(size)
        self._running: list[subprocess.Popen[bytes]] = []
        links: list[PartLink] = []
        for rank in range(1, size):
            own, theirs = socket.socketpair()
            job = PartJob(
                path, dtype, kv_dtype, device, threads, rank, size, store.port, theirs.fileno(), whole_experts
            )
            environment = dict(os.environ)
            if visible:
                environment["CUDA_VISIBLE_DEVICES"] = visible[rank]
            with theirs:
                self._running.append(_start(job, environment))
            links.append(PartLink(own, waits_s=WAITS_S))
        self.followers = Followers(links)
        try:
            # each is there, or has ended: from here on no process waits for one that never came
            self.followers.answers()
            self.group = Collectives.on(device, store, 0, size)
        except BaseException:
            self.close()
            raise
        self._watching = threading.Thread(target=self._watch, name="watch-parts", daemon=True)
        self._watching.start()

    def __repr__(self) -> str:
        return f"PartProcesses({[process.pid for process in self._running]})"

    @property
    def pids(self) -> list[int]:
        """The numbers of the other processes."""
        return [process.pid for process in self._running]

    def await_loaded(self, files: WeightFiles | None) -> None:
        """Wait until every process has loaded its part, from the same `files` as this one.

        Raises ValueError with its error, or if the files were changed meanwhile; LinkBroken if it ended.
        """
        numbers = self.followers.answers()
        if files is not None and any(number != files.number for number in numbers):
            raise ValueError("the weights were changed while the parts of this shard read them; load them again")

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason, from any thread, once a process has ended or hangs."""
        with self._is_told:
            self._on_lost = on_lost
            if self._lost:
                on_lost(self._lost)

    def close(self) -> None:
        """End the other processes, and wait for that."""
        self._closed.set()
        self.followers.close()
        for process in self._running:
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ends:
            for rank, process in enumerate(self._running, 1):
                if process.stdout is not None:
                    # it writes nothing there, so it is readable once the process has ended
                    ends.register(process.stdout, selectors.EVENT_READ, (rank, process))
            while not self._closed.is_set():
                ended = ends.select(_LOOKS_EVERY_S)
                if self._closed.is_set():
                    return
                if ended:
                    rank, process = ended[0][0].data
                    self._lose(f"part {rank} of this shard ended with status {process.wait()}")
                    return
                if self.followers.is_late:
                    self._lose("the parts of this shard did not come back from a step")
                    return

    def _lose(self, reason: str) -> None:
        log.critical("%s", reason)
        with self._is_told:
            self._lost = reason
            self._on_lost(reason)
        if not self._closed.wait(_ENDING_S):
            tell(f"{reason}; this process hangs and is ended", logging.ERROR)
            self._abort(EXIT_STATUS)


def gpus(size: int) -> list[str]:
    """The GPUs of `size` processes, as CUDA_VISIBLE_DEVICES names them. Raises ValueError if there are fewer."""
    import torch

    found = torch.cuda.device_count()
    if found < size:
        raise ValueError(
            f"--tensor-parallel is {size}, and {found} GPUs are visible; CUDA_VISIBLE_DEVICES chooses them"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in named.split(",")] if named else [str(number) for number in range(found)]


def _start(job: PartJob, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command: Sequence[str] = (sys.executable, "-P", "-m", "shards.parallel", msgspec.json.encode(job).decode())
    return subprocess.Popen(  # noqa: S603 - this program itself, without a shell  # nosec B603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(job.link,),
        env=environment,
        # a Ctrl-C in a terminal is for the first process, which ends the others after its requests
        start_new_session=True,
    )


def leading(model: Model, processes: PartProcesses) -> Model:
    """`model`, which has the part of this process, with a network of all parts."""
    from dataclasses import replace

    from shards.exec.network import DrawingNetwork
    from shards.parallel.leader import LeadingDevice, LeadingNetwork

    part = model.network
    lead = LeadingDevice if isinstance(part, DrawingNetwork) else LeadingNetwork
    return replace(model, network=lead(part, processes.followers, processes.watch))  # type: ignore[arg-type]
