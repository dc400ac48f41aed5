"""A store in a bucket of an S3-compatible service, through obstore.

Documents and contents are objects. Contents are read from copies in a folder of this machine, which keeps nothing that
the bucket does not have.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.errors import ConfigError
from policies.sla.batches import S3Settings
from router.batches.store.base import BatchStoreFailed
from router.batches.store.copies import LocalCopies
from router.batches.store.drafts import LocalDraft, LocalDrafts
from router.batches.store.s3_bucket import failing, open_bucket
from router.batches.store.s3_claims import S3Claim, S3Claims
from router.batches.store.s3_log import S3Log
from router.private_files import private_folder

if TYPE_CHECKING:
    from obstore.store import S3Store as Bucket

LOOK_S = 5.0
"""Each look is some requests, which cost money."""

_CHUNK_BYTES = 1 << 20
_MOST_CHANGES = 8
_COPIED_S = 86_400.0
"""Copies that were not used for so long are dropped."""

_log = logging.getLogger("pointsman.batches")


class S3BatchStore:
    """See BatchStore. `place` is `s3://bucket/prefix`."""

    look_s = LOOK_S
    shares_links = False

    def __init__(self, place: str, settings: S3Settings, *, clock: Callable[[], float]) -> None:
        self._place, self._scratch = place, Path(settings.scratch or Path(tempfile.gettempdir(), "pointsman-batches"))
        # in a folder of all users, another one may have been faster
        self._is_usual = settings.scratch is None
        self._bucket = open_bucket(place, settings)
        # tried again by the log itself, under another name
        self._once = open_bucket(place, settings, retries=0)
        self._drafts = LocalDrafts(self._scratch / "drafts", self._keep)
        self._copies = LocalCopies(self._scratch / "copies", store=f"{settings.endpoint} {place}")
        self._claims = S3Claims(open_bucket(place, settings, retries=0), clock=clock)

    def __repr__(self) -> str:
        return f"<S3BatchStore {self._place}>"

    def open(self) -> None:
        try:
            private_folder(self._scratch)
            if self._is_usual and (self._scratch.is_symlink() or self._scratch.stat().st_uid != os.geteuid()):
                raise PermissionError(1, "another user has made it")
            self._drafts.open()
            private_folder(self._copies.folder)
        except OSError as error:
            hint = "name a folder of this machine for temporary files"
            raise ConfigError(f"batches.s3.scratch {self._scratch} cannot be used: {error}", hint=hint) from error
        try:
            self._claims.require_conditions()
        except BatchStoreFailed as error:
            # clients' other requests are served all the same, and it may be back soon
            _log.warning("batches wait for their store %s: %s", self._place, error)

    def read(self, key: str) -> bytes | None:
        with failing():
            try:
                return bytes(self._bucket.get(key).bytes())
            except FileNotFoundError:
                return None

    def write(self, key: str, data: bytes) -> None:
        with failing(FileNotFoundError):
            self._bucket.put(key, data, use_multipart=False)

    def change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """See BatchStore: by conditional writes. One of which the answer was lost may have been done: then its
        condition does not hold when it is sent again, and `change` sees what it wrote."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        for _ in range(_MOST_CHANGES):
            found: bytes | None = None
            mode: Any = "create"
            with failing():
                try:
                    got = self._bucket.get(key)
                    found, mode = bytes(got.bytes()), {"e_tag": got.meta["e_tag"]}
                except FileNotFoundError:
                    pass
            if (data := change(found)) is None:
                return
            with failing(), suppress(AlreadyExistsError, PreconditionError, FileNotFoundError):
                self._bucket.put(key, data, mode=mode)
                return
        raise BatchStoreFailed(f"the store of batches failed: {key} is changed by others again and again")

    def names(self, folder: str) -> Sequence[str]:
        with failing(FileNotFoundError):
            found = self._bucket.list_with_delimiter(folder)
        paths = (*found["common_prefixes"], *(each["path"] for each in found["objects"]))
        return sorted(path.rpartition("/")[2] for path in paths)

    def sizes(self, *keys: str) -> int:
        total = 0
        for key in keys:
            with failing(FileNotFoundError):
                below = [each["size"] for page in self._bucket.list(key) for each in page]
            if not below:
                with failing(), suppress(FileNotFoundError):
                    total += self._bucket.head(key)["size"]
            total += sum(below)
        return total

    def delete(self, key: str) -> None:
        with failing():
            # a log is all objects below its key
            for each in [key, *pieces_of(self._bucket, key)]:
                with suppress(FileNotFoundError):
                    self._bucket.delete(each)
        self._copies.drop(key)

    def draft(self, owner: str) -> LocalDraft:
        """See BatchStore: a file of this machine that is sent whole."""
        return self._drafts.begin(owner)

    def drafted(self, owner: str) -> int:
        """See BatchStore: those of this machine."""
        return self._drafts.size(owner)

    def link(self, key: str, also: str) -> None:
        """See BatchStore: the service copies it. Raises FileNotFoundError."""
        with failing():
            self._bucket.copy(key, also)

    def local(self, key: str) -> Path:
        """See BatchStore: a copy."""
        with failing():
            return self._copies.get(key, lambda: self._bucket.get(key).stream(_CHUNK_BYTES))

    def log(self, key: str) -> S3Log:
        return S3Log(self._once, key, begun=len(pieces_of(self._bucket, key)))

    def logged(self, key: str) -> Iterator[bytes]:
        for piece in pieces_of(self._bucket, key):
            with failing(FileNotFoundError):
                data = bytes(self._bucket.get(piece).bytes())
            # not at other line breaks than a log has
            yield from (line + b"\n" for line in data.split(b"\n")[:-1])

    def claim(self, job: str) -> S3Claim | None:
        return self._claims.claim(job)

    def scratch(self) -> Path:
        return self._drafts.folder

    def sweep(self) -> None:
        """See BatchStore. Uploads that broke off are for a rule of the bucket to drop."""
        self._drafts.sweep()
        with failing():
            # by the clock that gave them their times; a copy is no more than a copy
            self._copies.sweep(time.time() - _COPIED_S)
        self._claims.sweep()

    def _keep(self, path: Path, key: str) -> None:
        with failing(FileNotFoundError):
            self._bucket.put(key, path)


def pieces_of(bucket: Bucket, key: str) -> list[str]:
    """The objects below `key`, in their order."""
    with failing(FileNotFoundError):
        return sorted(each["path"] for page in bucket.list(key) for each in page)
