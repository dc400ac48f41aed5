"""The fingerprint of a shard's KV: equal for two shards only if each can read the blocks of the other. Torch-free."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shards.kv.keys import BLOCK_TOKENS

FORMAT = 1
"""The version of the raw form of a block; a change of `shards.kv.raw_block` makes a new one."""

Layout = tuple[tuple[str, tuple[int, ...]], ...]
"""The type and the shape of each tensor that one block consists of."""

_SAMPLE_BYTES = 256
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class KvFacts:
    """Everything that the bytes of a block depend on, beside its tokens.

    `model` is the served name, which block keys depend on. `weights` identifies the weights, as `checkpoint_digest`
    does. `dtype` is their type. `numerics` has the further settings on which the last bits depend; empty if equal bits
    are not promised. `tensor_parallel`: this part of the model, and the number of parts.
    """

    model: str
    weights: str
    dtype: str
    layout: Layout
    numerics: str = ""
    tensor_parallel: tuple[int, int] = (0, 1)

    def fingerprint(self) -> bytes:
        """The SHA-256 of the facts, the block's size and the version of its raw form: 32 bytes."""
        facts = {**asdict(self), "block_tokens": BLOCK_TOKENS, "format": FORMAT}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def checkpoint_digest(folder: Path) -> str:
    """A hash of the configuration and the weights in `folder`, as hex digits; cheap, because tensors are only sampled.

    It covers config.json, and of each safetensors file its name, size, header, and 256 bytes from the middle of each
    tensor: two fine-tunes of one model have equal sizes and headers, and may differ in some tensors only. Raises
    OSError, and ValueError for a file that is not in the format of safetensors.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\x00{path.name}\x00{size}\x00".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if header_bytes > min(size, _MOST_HEADER_BYTES):
                raise ValueError(f"{path} has a header of {header_bytes} bytes; load the checkpoint again")
            header = file.read(header_bytes)
            digest.update(header)
            for start, end in _extents(header, path):
                file.seek(_LENGTH_BYTES + header_bytes + (start + end) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, end - (start + end) // 2)))
    return digest.hexdigest()


def _extents(header: bytes, path: Path) -> list[tuple[int, int]]:
    """The beginning and the end of each tensor behind `header`, ascending."""
    try:
        tensors = json.loads(header)
        return sorted(tuple(tensor["data_offsets"]) for name, tensor in tensors.items() if name != "__metadata__")
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} has no header of safetensors: {error}") from error
