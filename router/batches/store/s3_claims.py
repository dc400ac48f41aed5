"""The right to run jobs, as leases in a bucket.

A lease is an object that its owner writes again and again, each time on condition that it is still the one that the
owner wrote before (If-Match). Another router may take it once it has not seen it change for LEASE_S of its own clock,
so that clocks need not agree.

Source: Amazon S3 User Guide, "How to prevent object overwrites with conditional writes".
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from policies.errors import ConfigError
from router.batches.store.base import BatchStoreFailed
from router.batches.store.s3_bucket import failing

if TYPE_CHECKING:
    from obstore.store import S3Store as Bucket

LEASE_S = 30.0
"""A lease that was not renewed for so long is lost."""

_FREE = b"free"
_FOLDER = "claims"


class _Seen(NamedTuple):
    """A lease that another router has, as it was first seen."""

    e_tag: str | None
    at: float


class S3Claims:
    """All leases, as one router sees them. `clock` is monotonic, in seconds."""

    def __init__(self, bucket: Bucket, *, clock: Callable[[], float]) -> None:
        self._bucket, self._clock = bucket, clock
        self._seen: dict[str, _Seen] = {}

    def __repr__(self) -> str:
        return f"<S3Claims, {len(self._seen)} of other routers>"

    def require_conditions(self) -> None:
        """Raise ConfigError if the service refuses us, or ignores conditions; BatchStoreFailed if it is away."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        key = f"{_FOLDER}/probe-{uuid.uuid4().hex}"
        try:
            with failing():
                self._bucket.put(key, _FREE, mode="create")
        except FileNotFoundError as error:
            raise ConfigError("there is no such bucket as in batches.store", hint="make the bucket first") from error
        except BatchStoreFailed as error:
            if isinstance(error.__cause__, PermissionDeniedError | UnauthenticatedError):
                hint = "check access_key and secret_key of batches.s3, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                raise ConfigError(f"batches.store refuses this router: {error.message}", hint=hint) from error
            raise
        try:
            # a service may know one of the two
            conditions: tuple[Any, ...] = ("create", {"e_tag": f'"{uuid.uuid4().hex}"'})
            is_ignored = any(self._put(key, _FREE, mode) is not None for mode in conditions)
        finally:
            with failing():
                self._bucket.delete(key)
        if is_ignored:
            hint = "choose a service with If-None-Match and If-Match for PUT, or keep batches in a folder"
            raise ConfigError("the service of batches.store ignores conditions of writes", hint=hint)

    def claim(self, job: str) -> S3Claim | None:
        key, now = f"{_FOLDER}/{job}", self._clock()
        mode: Any = "create"
        found, e_tag = self._read(key)
        if e_tag is not None:
            if found != _FREE and not self._is_over(job, e_tag, now):
                return None
            mode = {"e_tag": e_tag}
        self._seen.pop(job, None)
        claim = S3Claim(self._put, self._read, key, self._clock)
        return claim if claim.take(mode) else None

    def sweep(self) -> None:
        """Drop leases that have not changed for LEASE_S of this router's clock, which is seen at the second sweep: each
        is taken before, so that no owner loses what it has just taken."""
        now, names = self._clock(), set[str]()
        with failing(FileNotFoundError):
            found = [each for page in self._bucket.list(_FOLDER) for each in page]
        for each in found:
            names.add(name := each["path"].rpartition("/")[2])
            if not self._is_over(name, each["e_tag"], now):
                continue
            claim = S3Claim(self._put, self._read, each["path"], self._clock)
            if claim.take({"e_tag": each["e_tag"]}):
                with failing(), suppress(FileNotFoundError):
                    self._bucket.delete(each["path"])
            names.discard(name)
        # a claim may be going on in another thread
        for name in [name for name in tuple(self._seen) if name not in names]:
            self._seen.pop(name, None)

    def _is_over(self, job: str, e_tag: str | None, now: float) -> bool:
        """Whether the lease of `job` has not changed for long enough."""
        seen = self._seen.get(job)
        if seen is None or seen.e_tag != e_tag:
            self._seen[job] = _Seen(e_tag, now)
            return False
        return now - seen.at >= LEASE_S

    def _read(self, key: str) -> tuple[bytes, str | None]:
        """What is at `key`, and its version; nothing if it is not there."""
        with failing():
            try:
                found = self._bucket.get(key)
                return bytes(found.bytes()), found.meta["e_tag"]
            except FileNotFoundError:
                return b"", None

    def _put(self, key: str, data: bytes, mode: Any) -> str | None:
        """Write `data` on the condition `mode`; the new version, None if the condition does not hold."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with failing(FileNotFoundError):
            try:
                return self._bucket.put(key, data, mode=mode)["e_tag"]
            except (AlreadyExistsError, PreconditionError):
                return None


class S3Claim:
    """See JobClaim. It is held from `take` on."""

    def __init__(
        self,
        put: Callable[[str, bytes, Any], str | None],
        read: Callable[[str], tuple[bytes, str | None]],
        key: str,
        clock: Callable[[], float],
    ) -> None:
        self._put, self._read, self._key, self._clock = put, read, key, clock
        self._e_tag: str | None = None
        self._unanswered: bytes | None = None
        """What was written last, if the service has not said whether it is there."""
        self._renewed_at = 0.0

    def __repr__(self) -> str:
        return f"<S3Claim {self._key}{'' if self.is_held else ', lost'}>"

    @property
    def is_held(self) -> bool:
        return self._e_tag is not None and self._clock() - self._renewed_at < LEASE_S

    def take(self, mode: Any) -> bool:
        """Write the lease on the condition `mode`; whether that holds."""
        # the others' time begins later, when they see it
        now, before, mine = self._clock(), self._unanswered, uuid.uuid4().hex.encode()
        self._unanswered = mine
        e_tag = self._put(self._key, mine, mode)
        if e_tag is None and before is not None:
            # the answer to an earlier write was lost: it is there if this is what it wrote
            found, version = self._read(self._key)
            e_tag = self._put(self._key, mine, {"e_tag": version}) if found == before else None
        self._e_tag, self._unanswered = e_tag, None
        self._renewed_at = now
        return self._e_tag is not None

    def renew(self) -> None:
        """See JobClaim. Raises BatchStoreFailed once it is lost."""
        try:
            is_ours = self._e_tag is not None and self.take({"e_tag": self._e_tag})
        except BatchStoreFailed:
            if self.is_held:
                # the service may be back before it is lost
                return
            raise
        if not is_ours:
            raise BatchStoreFailed(f"another router has taken {self._key}: this one was too late to renew its claim")

    def close(self) -> None:
        if not self.is_held:
            return
        mode, self._e_tag = {"e_tag": self._e_tag}, None
        self._put(self._key, _FREE, mode)
