"""The errors of every family's logits against transformers: a table for docs/models.md.

    python -m benchmarks.families [KIND ...]

Each checkpoint is tiny and random (2 layers, hidden size 64; transformers makes and saves it), and its logits spread
over several units. Errors are the largest over 140 positions: of a whole prompt, of chunks of 70 and 7 tokens
and then single ones, of a prompt behind 128 tokens that another sequence has computed, and of weights in bfloat16 and
int8. The latter are measured against the same weights in float32, with the mean beside the largest error: where two
experts score alike, rounding chooses another one.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.kv.cache import KvCache
from shards.network.config import NetworkConfig
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.loading import DtypeChoice, load_weights
from tests.shards.tiny_checkpoints import KINDS, a_batch, save_checkpoint, some_tokens

PROMPT, SHARED = 140, 128
PIECES = [(0, 70), (70, 7), *((at, 1) for at in range(77, PROMPT))]
BLOCKS = (9, 2, 3)


@dataclass(frozen=True)
class Errors:
    """One row of the table: largest errors in float32, then (largest, mean) of others, and those of transformers."""

    whole: float
    pieces: float
    behind: float
    bfloat16: tuple[float, float]
    theirs: tuple[float, float]
    int8: tuple[float, float]


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    """transformers' logits."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def in_pieces(decoder: Decoder, tokens: list[int], cache: KvCache) -> Tensor:
    """Logits of two chunks, followed by single tokens."""
    steps = [a_batch((tokens[at : at + count], at, BLOCKS)) for at, count in PIECES]
    return torch.cat([decoder.forward(step, cache) for step in steps])


def reduced(folder: Path, config: NetworkConfig, dtype: DtypeChoice, tokens: list[int], exact: Tensor) -> Tensor:
    """Errors of the weights in bfloat16 or int8."""
    cache = KvCache(config, 40, dtype=torch.bfloat16)
    return (in_pieces(Decoder(config, load_weights(folder, config, dtype=dtype)), tokens, cache) - exact).abs()


def both(errors: Tensor) -> tuple[float, float]:
    """The largest and the mean."""
    return errors.max().item(), errors.mean().item()


def measure(kind: str) -> Errors:
    """The errors of one kind of checkpoint."""
    tokens = some_tokens(PROMPT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_checkpoint(folder, kind)
        config = read_config(folder)
        decoder = Decoder(config, load_weights(folder, config))
        expected = logits_of(model, tokens)
        cache = KvCache(config, 40)
        whole = (decoder.forward(a_batch((tokens, 0, (4, 5, 6))), cache) - expected).abs()
        pieces = (in_pieces(decoder, tokens, cache) - expected).abs()
        other = tokens[:SHARED] + some_tokens(20, seed=1)
        behind = decoder.forward(a_batch((other[SHARED:], SHARED, (9, 2, 17))), cache)
        behind = (behind - logits_of(model, other)[SHARED:]).abs()
        model = save_checkpoint(folder, kind, dtype=torch.bfloat16)
        theirs = logits_of(model, tokens)
        exact = logits_of(model.float(), tokens)
        return Errors(
            whole.max().item(),
            pieces.max().item(),
            behind.max().item(),
            both(reduced(folder, config, "auto", tokens, exact)),
            both((theirs - exact).abs()),
            both(reduced(folder, config, "int8", tokens, exact)),
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of tests/shards/tiny_checkpoints.py; default: all")
    kinds = parser.parse_args().kinds or list(KINDS)
    if unknown := sorted(set(kinds) - KINDS.keys()):
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(KINDS)}")
    print(
        "| checkpoint | whole prompt | chunks, then tokens | behind a shared prefix | bfloat16 | transformers' | int8 |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in kinds:
        errors = measure(kind)
        cells = [f"{error:.0e}" for error in (errors.whole, errors.pieces, errors.behind)]
        cells += [f"{most:.2f} ({mean:.3f})" for most, mean in (errors.bfloat16, errors.theirs, errors.int8)]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
