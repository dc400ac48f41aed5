"""KV of layers with a window: counted for published shapes, and what it costs on a CPU.

First the bytes of context, the longest context and the sequences at once, with one pool and divided, from the code
that divides the memory. Then a network of Gemma 3's proportions with random weights decodes and prefills in both
layouts in turn, in one thread; medians of the ratios of CPU seconds count, because machines are noisy.

    python benchmarks/window_kv.py
    python benchmarks/window_kv.py --rounds 9 --gib 20
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch

from shards.engine import Engine, EngineOptions
from shards.kv.cache import bytes_per_block
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.window_layout import KvWindow, divide
from shards.model import Model, PagedNetwork
from shards.network.config import NetworkConfig, Rope
from shards.network.decoder import Decoder
from shards.network.loading import random_weights
from shards.nouns import SamplingParams, Submission
from shards.threads import use_threads


class Shape(NamedTuple):
    """What of a published model determines its KV."""

    name: str
    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int
    context_tokens: int

    @property
    def config(self) -> NetworkConfig:
        """A network with this KV."""
        heads = self.kv_heads
        return NetworkConfig(
            self.name, 1, 1, 1, heads, heads, self.head_dim, self.context_tokens, 1e-6, Rope(), self.windows
        )


def gemma_windows(layers: int, window: int) -> tuple[int | None, ...]:
    """Every sixth layer sees everything."""
    return tuple(window if (layer + 1) % 6 else None for layer in range(layers))


SHAPES = (
    Shape("Gemma 3 1B", gemma_windows(26, 512), 1, 256, 32_768),
    Shape("Gemma 3 12B", gemma_windows(48, 1024), 8, 256, 131_072),
    Shape("Gemma 3 27B", gemma_windows(62, 1024), 16, 128, 131_072),
    Shape("gpt-oss-20b", (128, None) * 12, 8, 64, 131_072),
    Shape("Mistral 7B v0.1", (4096,) * 32, 8, 128, 32_768),
)


def count(shape: Shape, memory_bytes: int) -> None:
    """Print what fits into `memory_bytes`, before and after."""
    config, dtype = shape.config, torch.bfloat16
    block_bytes, page_bytes = (bytes_per_block(each, dtype) for each in (config, config.of_layers(windowed=True)))
    assert config.window is not None
    window = KvWindow(config.window, page_bytes)
    blocks = memory_bytes // block_bytes
    layout = divide(
        blocks,
        window,
        block_bytes=block_bytes,
        context_tokens=shape.context_tokens,
        max_running=64,
        chunk_tokens=EngineOptions().chunk_tokens,
    )

    def at_once(tokens: int) -> str:
        held = -(-tokens // BLOCK_TOKENS)
        divided = min(layout.blocks // held, layout.pages // min(window.pages(1), held))
        return f"{blocks // held} -> {divided}"

    longest = (min(shape.context_tokens, count * BLOCK_TOKENS) for count in (blocks, layout.blocks))
    print(
        f"{shape.name}: {block_bytes // BLOCK_TOKENS} -> {(block_bytes - page_bytes) // BLOCK_TOKENS} bytes per token, "
        f"one window {window.pages(1) * page_bytes / 2**20:.1f} MiB; {blocks} blocks -> {layout.blocks} and "
        f"{layout.pages} pages; longest context {' -> '.join(map(str, longest))}; at once of 500 tokens "
        f"{at_once(500)}, of 4,096 {at_once(4096)}, of 16,384 {at_once(16_384)}"
    )


def an_engine(window_kv: str) -> Engine:
    """An engine of 12 layers of width 512, of which every sixth has no window."""
    config = NetworkConfig(
        "Qwen3ForCausalLM", 8192, 512, 2048, 8, 2, 64, 8192, 1e-6, Rope(), gemma_windows(12, 512), query_key_norm=True
    )
    network = PagedNetwork(Decoder(config, random_weights(config, 1)), kv_dtype=torch.float32)
    options = EngineOptions(kv_blocks=300, max_running=8, window_kv=window_kv, speculate="off", step_s=10.0)
    return Engine(Model("m", network), options)


def cpu_seconds(engine: Engine, number: int, *, rows: int, prompt_tokens: int, new: int) -> tuple[float, float]:
    """CPU seconds until all of `rows` prompts are computed, and from then on until their answers are."""
    rng = random.Random(number)
    for row in range(rows):
        prompt = np.array([rng.randrange(8192) for _ in range(prompt_tokens)], dtype="<u4")
        key = (number, row)
        engine.submit(Submission(key, prompt_tokens, new, sampling=SamplingParams(ignore_eos=True)))
        engine.extend(key, prompt.tobytes())
    began_s, drawn, ended = time.process_time(), set[object](), 0
    prefilled_s = began_s
    while ended < rows:
        report = engine.step()
        ended += len(report.finished)
        if len(drawn) < rows:
            drawn.update(draw.key for draw in report.drawn)
            prefilled_s = time.process_time()
    return prefilled_s - began_s, time.process_time() - prefilled_s


def main() -> None:
    """Print both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8, help="memory for KV in the counted part")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    for shape in SHAPES:
        count(shape, int(asked.gib * 2**30))
    use_threads(1)
    engines = {window_kv: an_engine(window_kv) for window_kv in ("all", "auto")}
    for rows, prompt_tokens, new in ((1, 300, 64), (2, 700, 24)):
        ratios: list[tuple[float, float]] = []
        for number in range(asked.rounds + 1):
            order = list(engines.items())
            found = {
                name: cpu_seconds(engine, number, rows=rows, prompt_tokens=prompt_tokens, new=new)
                for name, engine in (order if number % 2 else reversed(order))
            }
            if number:
                ratios.append((found["auto"][0] / found["all"][0], found["auto"][1] / found["all"][1]))
        prefill, decode = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"{rows} x {prompt_tokens} tokens, {new} drawn: divided / one pool, CPU seconds of prefill {prefill:.3f}")
        print(f"  and of decoding {decode:.3f}, medians of {len(ratios)} pairs")


if __name__ == "__main__":
    main()
