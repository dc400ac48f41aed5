"""What a router learns about the caches of backends, in the form in which other routers receive it."""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_KEYS = 4096
"""Blocks of one prompt that are told (262,144 tokens, 36 KiB). What lies beyond is believed nowhere but where it was
learnt: the others expect less of such a prompt than there is, never more."""

Key = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """A prompt went to `backend`; `noted` are the keys that Speculation notes of it."""

    backend: str
    noted: tuple[Key, ...]


class Learnt(msgspec.Struct, frozen=True, array_like=True, tag="learnt"):
    """`backend`, which tells nothing of its cache, answered a prompt of so many `blocks`, the first of them `keys`.

    The answer filled `drawn_blocks`. `cached_share` of the prompt was cached, as surely as `weight`; None: nobody
    knows. `counts`: it has told of cached tokens before, so that its zeros can be believed.
    """

    backend: str
    keys: tuple[Key, ...]
    blocks: Count
    drawn_blocks: Count = 0
    cached_share: Share | None = None
    weight: Share = 1.0
    counts: bool = False


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """`backend` broke off: what was just sent there may never have been computed."""

    backend: str


Belief = Sent | Learnt | Lost
