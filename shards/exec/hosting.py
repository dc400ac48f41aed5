"""The host memory beside a network's KV, its copier, and the directory on disk behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from shards.exec.network import HostedNetwork
from shards.kv.block_files import BlockFiles
from shards.kv.copier import BlockMemory, Copier
from shards.kv.disk import KvDirectory
from shards.kv.disk_jobs import DiskThreads, DiskWorker
from shards.kv.fingerprint import KvFacts
from shards.kv.lending import KvLending
from shards.kv.peer_identity import PeerIdentity, key_of, require_protected
from shards.kv.peer_jobs import PeerThreads
from shards.kv.peers import KvPeers
from shards.kv.raw_block import BlockLabels, RawMemory
from shards.model import Model
from shards.options import EngineOptions
from shards.shortage import gib, memory_for
from shards.weight_files import DigestMemory

_LEAST_SLOTS = 64
"""Host slots beside a disk, through which blocks pass on their way back."""

_STAGING = 16
"""Further slots, for blocks that wait to be written: a bounded queue."""


class KvExchange(NamedTuple):
    """What fetching from other shards and lending to them need; both prove the same `identity`."""

    identity: PeerIdentity
    peers: KvPeers
    lending: KvLending


class Hosting(NamedTuple):
    """The host tier's copier, the disk tier's directory, the exchange with other shards; None for what is not there."""

    copier: Copier | None = None
    directory: KvDirectory | None = None
    exchange: KvExchange | None = None


def host_slots(options: EngineOptions, block_bytes: int) -> int:
    """The number of blocks that the host memory holds: at least 64 beside a directory, and 16 on their way to it."""
    slots = options.host_bytes // block_bytes
    reserved = _STAGING * ((options.kv_dir is not None) + (options.kv_listen is not None))
    return max(slots, _LEAST_SLOTS) + reserved if reserved else slots


def open_hosting(
    model: Model,
    options: EngineOptions,
    copier_of: Callable[[BlockMemory], Copier],
    *,
    worker_of: Callable[[BlockFiles, Callable[[], float]], DiskWorker] = DiskThreads,
    clock: Callable[[], float] = time.monotonic,
) -> Hosting:
    """The tiers of `options` beside the allocated KV of `model`.

    Raises ValueError for a network with KV that cannot be moved, for a directory without room for one block, or weights
    that cannot be identified, NotEnoughMemory if the system has too little, OSError if the directory cannot be used.
    """
    network = model.network
    slots = host_slots(options, network.block_bytes)
    if not slots:
        return Hosting()
    if not isinstance(network, HostedNetwork):
        raise ValueError(f"host_bytes is {options.host_bytes}; this model's KV cannot be moved to the host")
    with memory_for(f"{gib(slots * network.block_bytes)} of KV on the host", hint="give the host tier less"):
        memory = network.host_memory(slots)
        copier = copier_of(memory)
    try:
        labels = _labels(model, options, memory)
        directory = _directory(model, options, memory, labels, worker_of, clock)
        return Hosting(copier, directory, _exchange(options, memory, labels, slots, clock))
    except (OSError, ValueError):
        copier.close()
        raise


def digests_in(kv_dir: Path) -> DigestMemory:
    """The digests of weights that shards with this `kv_dir` have read before."""
    return DigestMemory(kv_dir / "weights.json")


def kv_facts(model: Model, options: EngineOptions, memory: RawMemory) -> KvFacts:
    """The facts on which the bytes of a block of `model` depend. Raises ValueError for weights without an identity."""
    weights = model.weights
    if not weights and model.files is not None:
        weights = model.files.digest(None if options.kv_dir is None else digests_in(options.kv_dir))
    if not weights:
        raise ValueError(f"the weights of {model.name} were made in memory: nothing tells whether blocks are theirs")
    numerics = ""
    if options.deterministic:
        # equal bits are promised for any cache, and other libraries, processors and thread counts round otherwise
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        processor = f"{type(model.network).__name__} {gpu} {torch.backends.cpu.get_cpu_capability()}"
        numerics = f"deterministic, torch {torch.__version__}, {processor}, {torch.get_num_threads()} threads"
    return KvFacts(model.name, weights, model.dtype, memory.layout, numerics)


def _labels(model: Model, options: EngineOptions, memory: BlockMemory) -> BlockLabels | None:
    """What identifies blocks outside this shard; None if none leaves it."""
    if options.kv_dir is None and options.kv_listen is None:
        return None
    if not isinstance(memory, RawMemory):
        option = "kv_dir" if options.kv_listen is None else "kv_listen"
        raise ValueError(f"{option} is {getattr(options, option)}; the KV of this model cannot be read as bytes")
    return BlockLabels(model.name, kv_facts(model, options, memory).fingerprint())


def _exchange(
    options: EngineOptions,
    memory: BlockMemory,
    labels: BlockLabels | None,
    slots: int,
    clock: Callable[[], float],
) -> KvExchange | None:
    if options.kv_listen is None:
        return None
    assert labels is not None, "blocks leave this shard"
    assert isinstance(memory, RawMemory), "blocks are bytes"
    require_protected(options.kv_listen[0], is_protected=bool(options.kv_secret) or options.kv_tls is not None)
    identity = PeerIdentity(labels.fingerprint, key_of(options.kv_secret), options.kv_tls)
    lending = KvLending(memory, labels, slots - _STAGING, _STAGING)
    return KvExchange(identity, KvPeers(PeerThreads(identity, clock=clock), memory, labels, clock), lending)


def _are_unchanged(model: Model) -> Callable[[], bool]:
    """Whether the weights of `model` are still those that its digest is of."""
    return (lambda: True) if model.files is None else model.files.are_unchanged


def _directory(
    model: Model,
    options: EngineOptions,
    memory: BlockMemory,
    labels: BlockLabels | None,
    worker_of: Callable[[BlockFiles, Callable[[], float]], DiskWorker],
    clock: Callable[[], float],
) -> KvDirectory | None:
    if options.kv_dir is None:
        return None
    assert labels is not None, "blocks leave this shard"
    assert isinstance(memory, RawMemory), "blocks are bytes"
    if options.kv_dir_bytes < model.network.block_bytes:
        least = gib(model.network.block_bytes)
        raise ValueError(f"{gib(options.kv_dir_bytes)} on disk hold no KV block of {least}; give kv_dir more")
    files = BlockFiles(options.kv_dir, labels.fingerprint, may_write=_are_unchanged(model))
    try:
        headers, broken = files.scan()
        foreign = files.foreign()
    except OSError:
        files.close()
        raise
    return KvDirectory(
        worker_of(files, clock), memory, labels, options.kv_dir_bytes, _STAGING, headers, foreign, broken, clock
    )
