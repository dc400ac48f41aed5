"""A job: a file of requests, what is known of it, and how far it is. Immutable; each change makes a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from router.call.identify import Granted

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelled"]
"""Those of OpenAI's batches. Cancelling is none: it is a mark beside the job, which any router may set."""

ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

Api = Literal["openai", "anthropic"]

PREFIXES: Mapping[Api, str] = {"openai": "batch_", "anthropic": "msgbatch_"}


class Problem(msgspec.Struct, frozen=True):
    """Why a job failed: a mistake in its file, in this line (the first is 1; None: in the whole file)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Lines by how they ended. Those of `total` that are in none of the others have not ended."""

    total: int = 0
    succeeded: int = 0
    errored: int = 0
    expired: int = 0
    canceled: int = 0

    @property
    def left(self) -> int:
        """Lines that have not ended."""
        return self.total - self.succeeded - self.errored - self.expired - self.canceled


class JobTokens(msgspec.Struct, frozen=True):
    """Tokens that the answers of a job used; `cached` and `reasoning` are part of `prompt` and `completion`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def __add__(self, other: JobTokens) -> JobTokens:
        return JobTokens(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
            self.reasoning + other.reasoning,
        )


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job of `tenant`. Times are Unix seconds.

    `granted` says by which right its lines are asked for. These are calls of the
    path `endpoint` with these `headers`. `output_file` and `error_file` are chosen when it is finalized. `seconds_left`
    is the estimate of the router that runs it; None: unknown. `results_s` is how long its results are kept; None: as
    long as usual. `seq` counts the states that were kept: the next one is kept only behind the one that its writer has
    read.
    """

    id: str
    tenant: str
    api: Api
    endpoint: str
    created_at: float
    expires_at: float
    granted: Granted
    window: str = "24h"
    input_file: str = ""
    metadata: Mapping[str, str] | None = None
    headers: Mapping[str, str] = {}
    models: tuple[str, ...] = ()
    status: Status = "validating"
    counts: Counts = Counts()
    tokens: JobTokens = JobTokens()
    problems: tuple[Problem, ...] = ()
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    ended_at: float | None = None
    output_file: str | None = None
    error_file: str | None = None
    seconds_left: float | None = None
    results_s: float | None = None
    seq: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED

    @property
    def is_cancelling(self) -> bool:
        """Whether it was cancelled and has not ended."""
        return self.cancelling_at is not None and not self.has_ended
