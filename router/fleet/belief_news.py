"""News about backends' caches, as sent to other routers."""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_KEYS = 4096
"""Most blocks of one prompt that are sent (262,144 tokens, 36 KiB). Later blocks count only at the router that learned
them: the others underestimate such a prompt, and never overestimate it."""

Key = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """A prompt went to `backend`; `noted` are its keys for Speculation."""

    backend: str
    noted: tuple[Key, ...]


class Learnt(msgspec.Struct, frozen=True, array_like=True, tag="learnt"):
    """`backend`, which has no cache events, answered a prompt of `blocks` blocks that begins with `keys`.

    The answer filled `drawn_blocks`. `cached_share` of the prompt was cached, with certainty `weight`; None: unknown.
    `counts`: it has reported cached tokens before, so its zeros are meant.
    """

    backend: str
    keys: tuple[Key, ...]
    blocks: Count
    drawn_blocks: Count = 0
    cached_share: Share | None = None
    weight: Share = 1.0
    counts: bool = False


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """`backend` failed: prompts just sent there may never have been computed."""

    backend: str


Belief = Sent | Learnt | Lost
