"""A bucket of an S3-compatible service, and the names of its failures here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from policies.errors import ConfigError
from policies.sla.batches import S3Settings
from router.batches.store.base import BatchStoreFailed

if TYPE_CHECKING:
    from obstore.store import S3Store as Bucket

_REQUEST_S, _CONNECT_S = 20, 3
_RETRY_S, _RETRIES = 8, 3
"""For so long after the first try, a request is tried again: connections that break, and errors of the service."""

_SHOWN = 300


def open_bucket(place: str, settings: S3Settings, *, retries: int = _RETRIES) -> Bucket:
    """The bucket of `place`, `s3://bucket/prefix`; no request is sent. Credentials that `settings` do not have are
    found as AWS's own clients find them: in variables, by a web identity, or by the machine's role.

    Raises ConfigError without obstore.
    """
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        hint = "pip install 'pointsman[s3]'"
        raise ConfigError("batches.store is a bucket, and obstore is not installed", hint=hint) from error
    parts = urlsplit(place)
    given = {
        "endpoint": settings.endpoint,
        "region": settings.region,
        "access_key_id": settings.access_key,
        "secret_access_key": settings.secret_key,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        client_options={
            "timeout": timedelta(seconds=_REQUEST_S),
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "allow_http": (settings.endpoint or "").startswith("http://"),
            # the proxy that is given replaces those of the variables, and no address or name is asked through it
            "proxy_url": "http://127.0.0.1:9",
            "proxy_excludes": "0.0.0.0/0,::/0,*",
        },
        retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=_RETRY_S)},
        **options,
    )


@contextmanager
def failing(*also: type[Exception]) -> Iterator[None]:
    """Raise BatchStoreFailed in place of errors of the service and of OSError; of FileNotFoundError only if that is
    `also` one: there it is no missing object, but a missing bucket."""
    from obstore.exceptions import BaseError

    try:
        yield
    except also as error:
        raise _failure(error) from error
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        raise _failure(error) from error


def _failure(error: Exception) -> BatchStoreFailed:
    # behind the first line obstore prints its own state
    return BatchStoreFailed(f"the store of batches failed: {str(error).splitlines()[0][:_SHOWN]}")
