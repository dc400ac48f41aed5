"""A store in a bucket of an S3-compatible service, through obstore.

Documents and contents are objects. Contents are read from copies in a folder of this machine, which keeps nothing that
the bucket does not have.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from policies.errors import ConfigError
from policies.sla.batches import S3Settings
from router.batches.store.base import BatchStoreFailed
from router.batches.store.copies import LocalCopies
from router.batches.store.s3_bucket import failing, open_bucket
from router.batches.store.s3_claims import S3Claim, S3Claims
from router.batches.store.s3_log import S3Log

if TYPE_CHECKING:
    from obstore.store import S3Store as Bucket

LOOK_S = 5.0
"""Each look is some requests, which cost money."""

_CHUNK_BYTES = 1 << 20

_log = logging.getLogger("pointsman.batches")


class S3BatchStore:
    """See BatchStore. `place` is `s3://bucket/prefix`."""

    look_s = LOOK_S

    def __init__(self, place: str, settings: S3Settings, *, clock: Callable[[], float]) -> None:
        self._place, self._scratch = place, Path(settings.scratch or Path(tempfile.gettempdir(), "pointsman-batches"))
        self._bucket = open_bucket(place, settings)
        # tried again by the log itself, under another name
        self._once = open_bucket(place, settings, retries=0)
        self._copies = LocalCopies(self._scratch / "copies", store=f"{settings.endpoint} {place}")
        self._claims = S3Claims(open_bucket(place, settings, retries=0), clock=clock)

    def __repr__(self) -> str:
        return f"<S3BatchStore {self._place}>"

    def open(self) -> None:
        """See BatchStore."""
        try:
            for each in (self.scratch(), self._copies.folder):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            hint = "name a folder of this machine for temporary files"
            raise ConfigError(f"batches.s3.scratch {self._scratch} cannot be used: {error}", hint=hint) from error
        try:
            self._claims.require_conditions()
        except BatchStoreFailed as error:
            # clients' other requests are served all the same, and it may be back soon
            _log.warning("batches wait for their store %s: %s", self._place, error)

    def read(self, key: str) -> bytes | None:
        """See BatchStore."""
        with failing():
            try:
                return bytes(self._bucket.get(key).bytes())
            except FileNotFoundError:
                return None

    def write(self, key: str, data: bytes) -> None:
        """See BatchStore."""
        with failing(FileNotFoundError):
            self._bucket.put(key, data, use_multipart=False)

    def names(self, folder: str) -> Sequence[str]:
        """See BatchStore."""
        with failing(FileNotFoundError):
            found = self._bucket.list_with_delimiter(folder)
        paths = (*found["common_prefixes"], *(each["path"] for each in found["objects"]))
        return sorted(path.rpartition("/")[2] for path in paths)

    def sizes(self, folder: str) -> int:
        """See BatchStore."""
        with failing(FileNotFoundError):
            return sum(each["size"] for each in self._bucket.list_with_delimiter(folder)["objects"])

    def delete(self, key: str) -> None:
        """See BatchStore."""
        with failing():
            # a log is all objects below its key
            for each in [key, *pieces_of(self._bucket, key)]:
                with suppress(FileNotFoundError):
                    self._bucket.delete(each)
        self._copies.drop(key)

    def draft(self) -> S3Draft:
        """See BatchStore."""
        with failing():
            return S3Draft(self.scratch() / uuid.uuid4().hex, self._bucket)

    def link(self, key: str, also: str) -> None:
        """See BatchStore: the service copies it. Raises FileNotFoundError."""
        with failing():
            self._bucket.copy(key, also)

    def local(self, key: str) -> Path:
        """See BatchStore: a copy."""
        with failing():
            return self._copies.get(key, lambda: self._bucket.get(key).stream(_CHUNK_BYTES))

    def log(self, key: str) -> S3Log:
        """See BatchStore."""
        return S3Log(self._once, key, begun=len(pieces_of(self._bucket, key)))

    def logged(self, key: str) -> Iterator[bytes]:
        """See BatchStore."""
        for piece in pieces_of(self._bucket, key):
            with failing(FileNotFoundError):
                data = bytes(self._bucket.get(piece).bytes())
            yield from data.splitlines(keepends=True)

    def claim(self, job: str) -> S3Claim | None:
        """See BatchStore."""
        return self._claims.claim(job)

    def scratch(self) -> Path:
        """See BatchStore."""
        return self._scratch / "drafts"

    def sweep(self, before: float) -> None:
        """See BatchStore. Uploads that broke off are for a rule of the bucket to drop."""
        with failing():
            for entry in os.scandir(self.scratch()):
                with suppress(FileNotFoundError):
                    if entry.stat().st_mtime < before:
                        Path(entry.path).unlink(missing_ok=True)
            self._copies.sweep(before)
        self._claims.sweep(before)


def pieces_of(bucket: Bucket, key: str) -> list[str]:
    """The objects below `key`, in their order."""
    with failing(FileNotFoundError):
        return sorted(each["path"] for page in bucket.list(key) for each in page)


class S3Draft:
    """See ContentDraft: a file of this machine that is sent whole."""

    def __init__(self, path: Path, bucket: Bucket) -> None:
        self._path, self._bucket = path, bucket
        self._file = path.open("wb")
        self.size = 0

    def __repr__(self) -> str:
        return f"<S3Draft {self._path}, {self.size} bytes>"

    def write(self, data: bytes) -> None:
        """See ContentDraft."""
        with failing():
            self._file.write(data)
        self.size += len(data)

    def commit(self, key: str) -> None:
        """See ContentDraft."""
        with failing(FileNotFoundError):
            self._file.close()
            self._bucket.put(key, self._path)
            self._path.unlink()

    def discard(self) -> None:
        """See ContentDraft."""
        with suppress(OSError):
            # bytes that it could not write are not missed
            self._file.close()
        self._path.unlink(missing_ok=True)
