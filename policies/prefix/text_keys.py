"""Keys for text, for backends with prompts that are not tokenized: block keys' chain over chunks of UTF-8."""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 256
"""UTF-8 bytes in one chunk: about the text of one block of 64 tokens."""

_CHUNK = struct.Struct(f"{CHUNK_BYTES}s")


def text_keys(text: str, root: int) -> tuple[int, ...]:
    """The chained keys of all full chunks of `text` below `root`: equal keys mean, almost certainly, equal prefixes.

    The xxh3-64 of a chunk's bytes, seeded with the key of the chunk before. Lone surrogates, which UTF-8 cannot encode,
    are hashed as Python passes them.
    """
    data = text.encode("utf-8", "surrogatepass")
    digest, whole = xxh3_64_intdigest, len(data) - len(data) % CHUNK_BYTES
    return tuple([root := digest(chunk, root) for (chunk,) in _CHUNK.iter_unpack(memoryview(data)[:whole])])
