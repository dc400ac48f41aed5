"""The Protocol of a store: small documents, large contents, logs, and the ownership of jobs.

Keys are paths of plain names: `jobs/acme/batch_1.json`. All methods block; they raise BatchStoreFailed where the store
is away or full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from policies.errors import Unavailable


class BatchStoreFailed(Unavailable):
    """The store of batches is away or full."""

    masked_message = "the store of batches is away or full (try again later)"
    usual_hint = "try again later; the operator's log says more"


class ContentDraft(Protocol):
    """A content that is being written. It is there, whole, after `commit`, and leaves nothing after `discard`."""

    @property
    def size(self) -> int:
        """Bytes that were written."""
        ...

    def write(self, data: bytes) -> None:
        """Add `data`."""
        ...

    def written(self) -> BinaryIO:
        """What was written until now, as a file to read."""
        ...

    def commit(self, key: str) -> None:
        """Have the content under `key`, durably."""
        ...

    def discard(self) -> None:
        """Drop it, unless it was committed."""
        ...


class AnswerFile(Protocol):
    """Pieces that were appended, each whole or not there. Its job's owner alone has it."""

    def append(self, data: bytes) -> None:
        """Add one piece, which ends with a newline, durably."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class JobClaim(Protocol):
    """The right to run one job, while this process lives and renews it in time."""

    @property
    def is_held(self) -> bool:
        """Whether no other router may have it by now."""
        ...

    def renew(self) -> None:
        """Show that its owner lives. Raises BatchStoreFailed if another router may have it by now."""
        ...

    def close(self) -> None:
        """Let any router have it."""
        ...


class BatchStore(Protocol):
    """Keeps what batches need beyond the life of a router."""

    look_s: float
    """Seconds between two looks of a router: for jobs that no router runs, and for news of those that it runs."""

    shares_links: bool
    """Whether a content that has several keys takes its bytes once."""

    def open(self) -> None:
        """Be ready; called once, first. Raises ConfigError."""
        ...

    def read(self, key: str) -> bytes | None:
        """The document `key`; None without one."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Have `data` as the document `key`, durably: whole or, after a crash, as before."""
        ...

    def change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Have what `change` makes of the document `key` (None: there is none), which no other writer changes in
        between; None leaves it. `change` may be called again, with what another writer, or this one, has written."""
        ...

    def names(self, folder: str) -> Sequence[str]:
        """The last parts of the keys directly below `folder`, sorted."""
        ...

    def sizes(self, *keys: str) -> int:
        """Bytes of everything at `keys` or below them, as much as it takes."""
        ...

    def delete(self, key: str) -> None:
        """Drop the document, content or log `key`, if it is there."""
        ...

    def draft(self, owner: str) -> ContentDraft:
        """Begin a content of `owner`, a plain name or empty."""
        ...

    def drafted(self, owner: str) -> int:
        """Bytes of the contents that `owner` has begun, as far as they are written."""
        ...

    def link(self, key: str, also: str) -> None:
        """Have the content `key` under `also` too; it stays there if `key` is deleted."""
        ...

    def local(self, key: str) -> Path:
        """The content `key` as a file of this machine, which must not be changed. Raises FileNotFoundError."""
        ...

    def log(self, key: str) -> AnswerFile:
        """The log `key`, to append to; begun if it is not there."""
        ...

    def logged(self, key: str) -> Iterator[bytes]:
        """The lines of the log `key`, each with its newline; none without it."""
        ...

    def claim(self, job: str) -> JobClaim | None:
        """The right to run `job`; None if another owner has it."""
        ...

    def scratch(self) -> Path:
        """A folder of this machine for temporary files."""
        ...

    def sweep(self) -> None:
        """Drop what was begun and not finished by routers that do not run any more, and rights that no router has."""
        ...
