"""Keys for text, for backends with prompts that are not tokenized: block keys' chain over chunks of UTF-8."""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 256
"""UTF-8 bytes in one chunk: about the text of one block of 64 tokens."""

_CHUNK = struct.Struct(f"{CHUNK_BYTES}s")


def text_keys(data: bytes, root: int, *, before: bytes = b"") -> tuple[int, ...]:
    """The chained keys of all full chunks of a text's UTF-8, `before` and `data`, below `root`.

    Equal keys mean, almost certainly, equal prefixes: the xxh3-64 of a chunk, seeded with the key of the chunk before.
    `data` is not copied.
    """
    digest = xxh3_64_intdigest
    # the chunk with bytes of both ends there
    start = min(-len(before) % CHUNK_BYTES, len(data))
    keys = list[int]()
    for part in (before + data[:start], memoryview(data)[start:]):
        whole = len(part) - len(part) % CHUNK_BYTES
        keys += [root := digest(chunk, root) for (chunk,) in _CHUNK.iter_unpack(part[:whole])]
    return tuple(keys)
