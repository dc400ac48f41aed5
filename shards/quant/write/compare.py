"""How far the logits of a quantised checkpoint are from those of the original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from shards.exec.batch import Batch, Row
from shards.kv.cache import KvCache
from shards.kv.keys import BLOCK_TOKENS
from shards.network.config import NetworkConfig
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.loading import load_weights

MOST_TOKENS = 512

TEXT = """A router accepts requests from clients and sends each of them to one of several servers. Every server keeps
the keys and values of the tokens that it has computed, so that a prompt which begins like an earlier one needs less
work there. The router therefore has to know which server holds the longest beginning of a prompt, and how many requests
wait in front of each. In 1967, Peter Naur and others discussed the complexity of software at a conference in Garmisch;
the term "software engineering" was chosen to provoke. def mean(values): return sum(values) / len(values). The capital
of Portugal is Lisbon, and the river Tagus flows into the Atlantic Ocean there. If all roses are flowers and some
flowers fade quickly, it does not follow that some roses fade quickly. Q: What is 17 times 6? A: 102."""


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """Over `tokens` positions: the mean Kullback-Leibler divergence in nats of the original's next token from the
    other's, and the share of positions at which both hold the same token for the most probable one.
    """

    tokens: int
    divergence: float
    agreement: float


def compare(original: Path, quantised: Path, text: str | None = None) -> LogitDifference:
    """The difference on `text`, or else on a text of ours; random tokens if there is no tokenizer.json.

    Both are computed as a shard on a CPU computes them, one after the other. Raises CheckpointError.
    """
    config = read_config(original)
    tokens = _tokens(original, config, text or TEXT)
    before = _log_probabilities(original, tokens)
    after = _log_probabilities(quantised, tokens)
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    agreement = (before.argmax(-1) == after.argmax(-1)).float().mean()
    return LogitDifference(len(tokens), float(divergence), float(agreement))


def _tokens(folder: Path, config: NetworkConfig, text: str) -> list[int]:
    most = min(MOST_TOKENS, config.max_positions)
    file = folder / "tokenizer.json"
    if not file.exists():
        return torch.randint(0, config.vocab_size, (most,), generator=torch.Generator().manual_seed(0)).tolist()
    ids: list[int] = Tokenizer.from_file(str(file)).encode(text).ids
    return [token for token in ids if token < config.vocab_size][:most]


def _log_probabilities(folder: Path, tokens: list[int]) -> Tensor:
    config = read_config(folder)
    weights = load_weights(folder, config)
    blocks = range(-(-len(tokens) // BLOCK_TOKENS))
    cache = KvCache(config, len(blocks), dtype=weights.embedding.dtype)
    everything = torch.arange(len(tokens))
    rows = (Row(0, len(tokens), len(tokens), tuple(blocks)),)
    batch = Batch(torch.tensor(tokens), everything, everything, rows, everything)
    return Decoder(config, weights).forward(batch, cache).float().log_softmax(-1)
