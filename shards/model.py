"""A model as the engine gets it: a network, a tokenizer for stop strings, and its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokenizers import Tokenizer
from torch import Tensor, dtype

from shards.exec.batch import Batch
from shards.exec.runner import Network
from shards.kv.cache import KvCache, bytes_per_block

if TYPE_CHECKING:
    from shards.network.decoder import Decoder
    from shards.network.loading import DtypeChoice, OnProgress


class PagedNetwork:
    """A decoder bound to the memory of its KV: the engine's `Network`."""

    def __init__(self, decoder: Decoder, *, kv_dtype: dtype) -> None:
        self._decoder, self._kv_dtype = decoder, kv_dtype
        self._cache: KvCache | None = None

    def __repr__(self) -> str:
        return f"PagedNetwork({self._decoder!r}, {self._cache!r})"

    @property
    def vocabulary(self) -> int:
        """Size of the logits."""
        return self._decoder.config.vocab_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        return self._decoder.config.max_positions

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block."""
        return bytes_per_block(self._decoder.config, self._kv_dtype)

    def allocate(self, blocks: int) -> None:
        """Make memory for the KV of `blocks` blocks."""
        self._cache = KvCache(self._decoder.config, blocks, dtype=self._kv_dtype)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, float32 [len(batch.logit_rows), vocabulary]. Raises RuntimeError before `allocate`."""
        if self._cache is None:
            raise RuntimeError("no memory was allocated for KV")
        return self._decoder.forward(batch, self._cache)


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine serves under `name`. Without a `tokenizer` it cannot watch for stop strings.

    `path` is the folder that it was loaded from; None for one that was made in memory.
    """

    name: str
    network: Network
    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    path: Path | None = None
    dtype: str = "float32"

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.network.vocabulary

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        on_progress: OnProgress | None = None,
    ) -> Model:
        """The model in the Hugging Face folder `path`, called `name` or as the folder is.

        `dtype` is auto (the checkpoint's own), float32 or bfloat16; `device` is cpu, cuda, or auto, which is cuda where
        there is a GPU and Triton. `on_progress` is called with the bytes read so far
        and in all. Raises CheckpointError, or ValueError for another dtype or device.
        """
        import torch

        from shards.gpu.device import choose_device
        from shards.network.config import NetworkConfig
        from shards.network.decoder import Decoder
        from shards.network.loading import load_weights

        if dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype is {dtype}; it must be auto, float32 or bfloat16")
        on = choose_device(device)
        config = NetworkConfig.read(path)
        weights = load_weights(path, config, dtype=cast("DtypeChoice", dtype), on_progress=on_progress)
        network: Network
        kv_dtype = weights.embedding.dtype
        if on.type == "cuda":
            from shards.gpu.network import GpuNetwork
            from shards.gpu.weights import moved

            # float16 checkpoints become float32 for CPUs, and GPUs have no fast float32
            kv_dtype = torch.bfloat16 if dtype == "auto" else kv_dtype
            network = GpuNetwork.of(config, moved(weights, config, device=on, dtype=kv_dtype))
        else:
            network = PagedNetwork(Decoder(config, weights), kv_dtype=kv_dtype)
        return cls(
            name=name or path.resolve().name,
            network=network,
            tokenizer=_tokenizer(path),
            eos_token_ids=config.eos_token_ids,
            path=path,
            dtype=str(kv_dtype).removeprefix("torch."),
        )


def _tokenizer(path: Path) -> Tokenizer | None:
    from shards.network.errors import BrokenCheckpoint

    file = path / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        # tokenizers raises bare Exception for whatever is wrong with the file
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error
