from __future__ import annotations

import pytest

from backends.shard.messages import error_of
from policies.errors import (
    BackendFailed,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unreached,
)
from shards.wire.v1.shard_pb2 import Finished


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (Finished(reason=Finished.DEADLINE), DeadlineExceeded),
        (Finished(reason=Finished.CANCELLED), BackendFailed),
        (Finished(reason=Finished.FAILED, message="why"), BackendFailed),
        (Finished(reason=Finished.REASON_UNSPECIFIED), BackendFailed),
        (Finished(reason=Finished.REJECTED, cause=Finished.CONTEXT, message="why"), ContextExceeded),
        (Finished(reason=Finished.REJECTED, cause=Finished.OVERLOADED), Overloaded),
        (Finished(reason=Finished.REJECTED, cause=Finished.DRAINING), Unreached),
        (Finished(reason=Finished.REJECTED, cause=Finished.INVALID, message="why"), InvalidRequest),
        (Finished(reason=Finished.REJECTED), InvalidRequest),
    ],
)
def test_each_end_has_its_error(end: Finished, kind: type[ExpectedError]) -> None:
    failure = error_of(end, "own-0")
    assert type(failure) is kind
    assert end.message in failure.message
