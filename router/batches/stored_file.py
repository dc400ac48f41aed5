"""A file that a tenant sent, or that a job wrote for it."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Purpose = Literal["batch", "batch_output"]
"""Of OpenAI's purposes, those that there is a use for here."""

PURPOSES: tuple[str, ...] = get_args(Purpose)

PREFIX = "file-"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file. Times are Unix seconds."""

    id: str
    tenant: str
    purpose: Purpose
    name: str
    size: int
    created_at: float
    expires_at: float
