"""A log in a bucket. Objects cannot be appended to, so it is a row of them: the last one is written again with each
piece that is added, until it is large."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.batches.store.base import BatchStoreFailed
from router.batches.store.s3_bucket import failing

if TYPE_CHECKING:
    from obstore.store import S3Store as Bucket

_OBJECT_BYTES = 256 << 10
_TRIES, _REST_S = 4, 0.25


class S3Log:
    """See AnswerFile. There are `begun` objects already.

    After a failed write, an object is never written again: the failed request may still be on its way, and would undo
    the later one. So a piece can be there twice, which readers of answers do not mind.
    """

    def __init__(self, bucket: Bucket, key: str, *, begun: int, sleep: Callable[[float], object] = time.sleep) -> None:
        self._bucket, self._key, self._sleep = bucket, key, sleep
        # an owner that has lost its claim may write at the same time
        self._owner = uuid.uuid4().hex[:12]
        self._number, self._data = begun, b""

    def __repr__(self) -> str:
        return f"<S3Log {self._key}, {self._number} objects before {len(self._data)} bytes>"

    def append(self, data: bytes) -> None:
        for attempt in range(_TRIES):
            if len(self._data) >= _OBJECT_BYTES:
                self._number, self._data = self._number + 1, b""
            try:
                with failing(FileNotFoundError):
                    self._bucket.put(
                        f"{self._key}/{self._number:08d}-{self._owner}", self._data + data, use_multipart=False
                    )
            except BatchStoreFailed:
                self._number, self._data = self._number + 1, b""
                if attempt == _TRIES - 1:
                    raise
                self._sleep(_REST_S * 2**attempt)
            else:
                self._data += data
                return

    def close(self) -> None:
        """See AnswerFile: nothing is open."""
