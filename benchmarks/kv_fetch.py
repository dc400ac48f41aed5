"""Prompts fetched from another shard's process, against computing them, and the link against a plain socket.

Random weights of the shape of Qwen3-0.6B, or with `--model small` of a small network. For each length the lender
computes a prompt, and this process fetches its KV; then this process computes another prompt of that length. Prints
both times to the first token, predicted and measured, the rate of the transfer beside that of a plain TCP connection
between two processes in the same run, and the crossover: the rate at which fetching takes as long as computing.

    python -m benchmarks.kv_fetch --tokens 512 1024 2048
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from benchmarks.kv_dir import MIB, MODELS, a_network
from shards.engine import Engine, EngineOptions
from shards.kv.host_memory import HostMemory
from shards.kv.keys import BLOCK_TOKENS
from shards.model import Model
from shards.nouns import FinishReason, KvSource, SamplingParams, Submission
from shards.sched.cost import prefill_shape
from shards.threads import use_threads
from shards.warmup import warm_up

SECRET = b"of this benchmark only"
PLAIN_BYTES = 512 * MIB


def an_engine(model: str, tokens: int) -> Engine:
    """An engine that has been warmed up, and exchanges KV."""
    network, blocks = a_network(MODELS[model], "cpu"), tokens // BLOCK_TOKENS + 48
    options = EngineOptions(
        kv_blocks=blocks,
        host_bytes=blocks * network.block_bytes,
        max_running=2,
        window_tokens=tokens + BLOCK_TOKENS,
        kv_listen=("127.0.0.1", 0),
        kv_secret=SECRET,
    )
    engine = Engine(Model("random", network, weights="random, seed 0", dtype="bfloat16"), options)
    warm_up(engine)
    write_once(engine, blocks)
    return engine


def write_once(engine: Engine, blocks: int) -> None:
    """Write to all memory, as a shard has that runs for a while: the first write may take longer than the link."""
    assert engine._exchange is not None
    memory = engine._exchange.lending.memory
    assert isinstance(memory, HostMemory)
    for slot in range(memory.slots):
        for piece in memory.raw(slot):
            piece[:] = bytes(len(piece))
    for block in range(blocks):
        memory.load(0, block)


def a_prompt(seed: int, tokens: int) -> bytes:
    """Random token ids."""
    rng = random.Random(seed)
    return np.array([rng.randrange(1000, 100_000) for _ in range(tokens)], dtype="<u4").tobytes()


def ask(engine: Engine, prompt: bytes, source: KvSource | None = None) -> tuple[float, int]:
    """Seconds to the first token, and the cached tokens."""
    started, tokens = time.perf_counter(), len(prompt) // 4
    engine.submit(Submission("it", tokens, 1, sampling=SamplingParams(ignore_eos=True), source=source))
    engine.extend("it", prompt)
    while not (report := engine.step()).finished:
        if not report.progress:
            # as a shard's loop does: threads that move bytes have their turn
            time.sleep(0.001)
    assert report.finished[0].reason is FinishReason.LENGTH, report.finished[0].message
    return time.perf_counter() - started, report.finished[0].cached_tokens


def lend(model: str, tokens: int) -> None:
    """The other process: computes a prompt for each line `seed tokens` that it reads, and lends."""
    use_threads(1)
    engine = an_engine(model, tokens)
    print(engine.kv_address, flush=True)
    wanted, changed = list[str](), threading.Event()
    engine.wake = changed.set

    def hear() -> None:
        for line in iter(sys.stdin.readline, ""):
            wanted.append(line)
            changed.set()
        os._exit(0)

    threading.Thread(target=hear, daemon=True).start()
    while True:
        if wanted:
            seed, length = map(int, wanted.pop(0).split())
            ask(engine, a_prompt(seed, length))
            print("computed", flush=True)
        engine.step()
        changed.wait(0.001 if engine.has_work else 0.05)
        changed.clear()


def plain_rate() -> float:
    """Bytes per second of one TCP connection to another process that only sends."""
    code = "import socket,sys\ns=socket.create_connection(('127.0.0.1',int(sys.argv[1])))\nb=bytes(1<<20)\n"
    code += f"for _ in range({PLAIN_BYTES // MIB}): s.sendall(b)\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = subprocess.Popen([sys.executable, "-c", code, str(server.getsockname()[1])])
        connection, _ = server.accept()
        with connection:
            began, into, left = time.perf_counter(), memoryview(bytearray(MIB)), PLAIN_BYTES
            while left and (count := connection.recv_into(into)):
                left -= count
        seconds = time.perf_counter() - began
        sender.wait()
    return PLAIN_BYTES / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--lend", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    most = max(arguments.tokens)
    if arguments.lend:
        lend(arguments.model, most)
        return
    use_threads(1)
    command = [sys.executable, "-m", "benchmarks.kv_fetch", "--lend", "--model", arguments.model, "--tokens", str(most)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        address = lender.stdout.readline().strip()
        engine = an_engine(arguments.model, most)
        block_bytes = engine.model.network.block_bytes
        plain = plain_rate()
        print(f"a block takes {block_bytes / MIB:.2f} MiB; a plain socket: {plain / 1e9:.2f} GB/s")
        print("tokens   computed: predicted  measured   fetched: measured  cached    GB/s   crossover")
        for seed, tokens in enumerate(arguments.tokens):
            lender.stdin.write(f"{seed} {tokens}\n")
            lender.stdin.flush()
            assert lender.stdout.readline().strip() == "computed"
            before = engine._pool.peers.use
            fetched_s, cached = ask(engine, a_prompt(seed, tokens), KvSource(address, tokens))
            use = engine._pool.peers.use
            assert before is not None
            assert use is not None
            moved, seconds = use.received_bytes - before.received_bytes, use.seconds - before.seconds
            predicted_s = engine._scheduler.cost.predict_s(prefill_shape(0, tokens))
            computed_s, _ = ask(engine, a_prompt(seed + 1000, tokens))
            crossover = tokens / BLOCK_TOKENS * block_bytes / computed_s
            print(
                f"{tokens:6}   {predicted_s:17.3f} s {computed_s:7.3f} s   {fetched_s:15.3f} s {cached:7}"
                f" {moved / max(seconds, 1e-9) / 1e9:7.2f}   {crossover / 1e9:.3f} GB/s",
                flush=True,
            )
        lender.stdin.close()
        engine.close()


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
