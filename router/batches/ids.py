"""Names of files and jobs. They sort by the time at which they were made, and are safe as names of files."""

from __future__ import annotations

import random
import re

_MADE = re.compile(r"(?:file-|batch_|msgbatch_)[0-9a-f]{28}", re.ASCII)


def new_id(prefix: str, unix_s: float, rng: random.Random) -> str:
    """A name that begins with `prefix`: the milliseconds of its time, then 64 random bits."""
    return f"{prefix}{round(unix_s * 1000):012x}{rng.getrandbits(64):016x}"


def made_at(id: str) -> float:  # noqa: A002
    """The Unix time at which a name was made; 0 for what is no such name."""
    return int(id[-28:-16], 16) / 1000 if _MADE.fullmatch(id) else 0.0


def is_id(text: str, prefix: str) -> bool:
    """Whether `text` has the form of a name with this prefix."""
    return text.startswith(prefix) and _MADE.fullmatch(text) is not None
