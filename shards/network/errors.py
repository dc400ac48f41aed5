"""Errors in a checkpoint, in words for the operator that selected it."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be served. `message` is the reason, `hint` the remedy."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message, self.hint = message, hint


class UnsupportedCheckpoint(CheckpointError):
    """The checkpoint is sound, but of a kind that this engine does not support."""


class BrokenCheckpoint(CheckpointError):
    """Files or tensors are missing, unreadable, left over or of the wrong shape."""
