"""A model's own files, as pieces for the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from shards.wire import limits
from shards.wire.v1 import shard_pb2 as wire

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja")
"""What a router needs to speak for a model. A checkpoint may lack some of them."""


async def asset_pieces(folder: Path) -> AsyncIterator[wire.AssetPiece]:
    """Those of FILES that are in `folder`, one after the other; reading happens off the event loop."""
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        content = await asyncio.to_thread(path.read_bytes)
        for start in range(0, max(1, len(content)), limits.ASSET_PIECE_BYTES):
            end = start + limits.ASSET_PIECE_BYTES
            yield wire.AssetPiece(file=name, content=content[start:end], last=end >= len(content))
