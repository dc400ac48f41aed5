"""A model's files, as pieces for the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from shards.wire import limits
from shards.wire.v1 import shard_pb2 as wire

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja")
"""The files that a router needs to use a model. A checkpoint may lack some of them."""


async def asset_pieces(folder: Path) -> AsyncIterator[wire.AssetPiece]:
    """The existing FILES of `folder`, one after the other; they are read off the event loop."""
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        content = await asyncio.to_thread(path.read_bytes)
        for start in range(0, max(1, len(content)), limits.ASSET_PIECE_BYTES):
            end = start + limits.ASSET_PIECE_BYTES
            yield wire.AssetPiece(file=name, content=content[start:end], last=end >= len(content))
