"""Errors of redis-py and of the network, as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions as failures

from router.shared.store.base import Fault, StoreFailed

_REFUSALS = (failures.AuthenticationError, failures.ResponseError)


@contextmanager
def faults() -> Iterator[None]:
    """Maps errors of redis-py and of the network to ours. The order matters: some are subclasses of others."""
    try:
        yield
    except (failures.TimeoutError, failures.BusyLoadingError, TimeoutError) as error:
        raise StoreFailed(Fault.SLOW, str(error)) from error
    except failures.InvalidResponse as error:
        raise StoreFailed(Fault.NONSENSE, str(error)) from error
    except (failures.ConnectionError, OSError) as error:
        # redis-py reports a rejected password as a failed connection
        is_refused = any(isinstance(each, _REFUSALS) for each in (error, error.__cause__))
        raise StoreFailed(Fault.REFUSING if is_refused else Fault.GONE, str(error)) from error
    except (failures.ClusterError, failures.RedisClusterException) as error:
        # no node answers, or none has the slot: a primary is gone and no replica has taken over
        raise StoreFailed(Fault.GONE, str(error)) from error
    except RuntimeError as error:
        # uvloop, for a write to a connection that was reset
        if "handler is closed" not in str(error):
            raise
        raise StoreFailed(Fault.GONE, str(error)) from error
    except failures.ResponseError as error:
        raise StoreFailed(_answered(error), str(error)) from error
    except (failures.RedisError, ValueError) as error:
        raise StoreFailed(Fault.NONSENSE, str(error)) from error


def _answered(error: failures.ResponseError) -> Fault:
    """The fault behind an answer that is an error."""
    # Redis 6 reports full memory inside the script's own error
    if isinstance(error, failures.OutOfMemoryError) or "OOM " in str(error):
        return Fault.FULL
    # another client's script runs for too long
    return Fault.SLOW if str(error).startswith("BUSY ") else Fault.REFUSING
