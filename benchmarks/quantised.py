"""The errors of every quantised form of weights and KV: tables for docs/quantisation.md.

    python -m benchmarks.quantised

A tiny random checkpoint (Qwen3 with 2 layers and hidden size 64; `--kind` takes another one of tests/shards) is stored
in each published form, packed as its documents say by code that shares nothing with the readers. transformers computes
the same numbers in float32: that is the reference, because transformers on a CPU reads few of these forms. Errors are
the largest over all logits of 140 tokens, with the mean in brackets; logits spread over several units.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shards.kv.cache import bytes_per_block
from shards.kv.quantised import kv_dtype_of, make_cache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.layers import Weights
from shards.network.loading import load_weights
from tests.shards.quantised_checkpoints import SCHEMES, save_quantised
from tests.shards.tiny_checkpoints import a_batch, save_checkpoint, some_tokens

TOKENS, BLOCKS = some_tokens(140), (4, 5, 6)
# the interpreter computes a chunk in a second
ON_GPU = TOKENS[:12]


def reference(folder: Path, tokens: list[int]) -> Tensor:
    """transformers' logits in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def decoded(folder: Path, weights: Weights, kv_dtype: str = "auto") -> Tensor:
    """A decoder's logits: a chunk of 100 tokens, one of 30, then single ones, all behind what the cache holds."""
    config, computed = read_config(folder), weights.embedding.dtype
    cache = make_cache(config, 8, dtype=kv_dtype_of(kv_dtype, computed=computed), computed=computed)
    decoder = Decoder(config, weights)
    pieces = [(0, 100), (100, 30), *((at, 1) for at in range(130, 140))]
    batches = [a_batch((TOKENS[at : at + count], at, BLOCKS)) for at, count in pieces]
    return torch.cat([decoder.forward(batch, cache).float() for batch in batches])


def on_gpu_kernels(folder: Path) -> Tensor:
    """Logits of the GPU's decoder in Triton's interpreter, float32."""
    from shards.gpu.network import GpuNetwork
    from shards.gpu.weights import moved

    config, device = read_config(folder), torch.device("cpu")
    weights = load_weights(folder, config, dtype="float32", is_for_gpu=True)
    network = GpuNetwork.of(config, moved(weights, config, device=device, dtype=torch.float32))
    network.allocate(4)
    return network.forward(a_batch((ON_GPU, 0, (3,)))).clone()


def shown(logits: Tensor, expected: Tensor) -> str:
    """The largest and the mean error."""
    errors = (logits - expected).abs()
    return f"{errors.max():.0e}" if errors.max() < 1e-2 else f"{errors.max():.2f} ({errors.mean():.3f})"


def weights_table(kind: str) -> Iterator[str]:
    """A row for each form of weights."""
    yield "| weights | as stored | GPU kernels | CPU, `auto` | CPU, `int8` | the form itself |"
    yield "|---|---|---|---|---|---|"
    for scheme in SCHEMES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_quantised(folder, kind, scheme, dtype=torch.bfloat16)
            stored = folder / "quantised"
            config = read_config(stored)
            expected = reference(folder / "meant", TOKENS)
            exact = load_weights(stored, config, dtype="float32", is_for_gpu=True)
            yield " | ".join(
                (
                    f"| {scheme}",
                    shown(decoded(stored, exact), expected),
                    shown(on_gpu_kernels(stored), expected[: len(ON_GPU)]),
                    shown(decoded(stored, load_weights(stored, config)), expected),
                    shown(decoded(stored, load_weights(stored, config, dtype="int8")), expected),
                    shown(expected, reference(folder / "plain", TOKENS)) + " |",
                )
            )


def kv_table(kind: str) -> Iterator[str]:
    """A row for each type of KV, with weights in float32 and in bfloat16."""
    yield "| KV | bytes for a block of 64 tokens | weights in float32 | weights in bfloat16 |"
    yield "|---|---|---|---|"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoint(folder, kind, dtype=torch.bfloat16)
        config, expected = read_config(folder), reference(folder, TOKENS)
        for kv_dtype in ("auto", "int8", "fp8"):
            cells = []
            for dtype in ("float32", "bfloat16"):
                loaded = load_weights(folder, config, dtype=dtype)  # type: ignore[arg-type]
                cells.append(shown(decoded(folder, loaded, kv_dtype), expected))
            block = bytes_per_block(config, kv_dtype_of(kv_dtype, computed=torch.bfloat16))
            yield f"| {kv_dtype} | {block:,} | {' | '.join(cells)} |"


def written_table() -> Iterator[str]:
    """A row for each form that `pointsman quantize` writes, of the bundled model."""
    yield "| `--to` | matrices, mean (largest) error | same token | KL divergence, nats |"
    yield "|---|---|---|---|"
    from shards.bundled import weights
    from shards.quant.write.checkpoint import write_quantised
    from shards.quant.write.compare import compare
    from shards.quant.write.forms import FORMS

    for form in FORMS:
        with tempfile.TemporaryDirectory() as name:
            written = write_quantised(weights(), Path(name), form)
            difference = compare(weights(), Path(name))
            errors = f"{written.mean_error:.2%} ({written.largest_error:.2%})"
            yield f"| {form} | {errors} | {difference.agreement:.1%} | {difference.divergence:.4f} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="qwen3", help="a checkpoint of tests/shards/tiny_checkpoints.py")
    asked = parser.parse_args()
    for table in (weights_table(asked.kind), kv_table(asked.kind), written_table()):
        for line in table:
            print(line, flush=True)
        print()


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        # set before triton is imported, hence another process
        environment = os.environ | {"TRITON_INTERPRET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, "-m", "benchmarks.quantised", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
    main()
