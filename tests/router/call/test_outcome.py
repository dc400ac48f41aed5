from __future__ import annotations

import asyncio

from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Outcome
from router.call.caller import CallerGone
from router.call.outcome import outcome_of


def test_every_outcome_has_a_cause() -> None:
    causes = [None, asyncio.CancelledError(), CallerGone(), InvalidRequest("x"), BackendFailed("x"), RuntimeError()]
    outcomes = [outcome_of(cause) for cause in causes]
    assert outcomes == [
        Outcome.FINISHED,
        Outcome.CANCELLED,
        Outcome.CANCELLED,
        Outcome.REJECTED,
        Outcome.FAILED,
        Outcome.FAILED,
    ]
