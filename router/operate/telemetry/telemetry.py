"""Metrics, traces, the decision log and the structured log, all through one object."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from policies.errors import ExpectedError
from policies.nouns import BackendView, Decision, Outcome, Request
from policies.prefix.parity import Doubt, ParityReport, Trust
from policies.shadow import Difference
from router.call.observer import Account, UsageDoubt
from router.call.outcome import code_of, outcome_of, why_of
from router.call.tracing import Answered, PromptTrace, Tracing
from router.later import Do, Later, at_once
from router.operate.plan.recent import RecentRequests
from router.operate.telemetry.backend_metrics import BackendMetrics
from router.operate.telemetry.batch_metrics import BatchMetrics
from router.operate.telemetry.decision_log import DecisionLog, LoggedPrompt
from router.operate.telemetry.decision_record import Ended
from router.operate.telemetry.metrics import Metrics
from shards.logs import LogFields

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10, 120)
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)

_decisions = logging.getLogger("pointsman.decision")
_shadows = logging.getLogger("pointsman.shadow")
_outcomes = logging.getLogger("pointsman.outcome")

_parity = logging.getLogger("pointsman.parity")

_NO_CONTEXT: Mapping[str, str] = MappingProxyType({})


class Listener(Protocol):
    """Gets the events of telemetry as they happen. Its methods must be cheap, because calls wait for them."""

    def decided(self, request: Request, decision: Decision, at: float) -> None:
        """`decision` was made for `request` at `at` of the router's clock."""
        ...

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:
        """The call of `account` ended so at `at` of the router's clock; `code` is the error's, or the outcome again."""
        ...

    def missed(self, service_class: str, step: str) -> None:
        """A target of the class is predicted to be missed, and this step of `on_miss` is tried."""
        ...


class Telemetry:
    """All metrics of one router, in a registry of its own; `backends` are those of its cluster, `batches` those of its
    batches.

    `tracing` and `decisions`, if given, get every call. `on_refused` gets the address and the reason of each key or
    token that was not accepted. What calls tell is counted `later`, in order, and before the metrics are read.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        tracing: Tracing | None = None,
        decisions: DecisionLog | None = None,
        unix_time: Callable[[], float] = time.time,
        later: Do = at_once,
    ) -> None:
        self.later = later
        self._clock, self._unix_time, self._tracing, self.decisions = clock, unix_time, tracing, decisions
        self._registry = CollectorRegistry()
        made = self.metrics = Metrics(self._registry, unix_time=unix_time)
        recent = self._recent = RecentRequests(clock, unix_time)
        made.computed(
            "pool_backends_needed", "Backends that the requests of the last minutes needed", "pool", recent.needed
        )
        self.backends = BackendMetrics(made)
        self.batches = BatchMetrics(made)
        labels = ("tenant", "service_class")
        self._requests = made.counter("requests", "Requests by how they ended", (*labels, "outcome"))
        self._refusals = made.counter("errors", "Requests that did not finish, by error code", ("code",))
        self._ttft = made.histogram("ttft_seconds", "Time to the first token of an answer", labels, _LATENCY_S)
        self._tpot = made.histogram("tpot_seconds", "Mean time per further output token", labels, _TPOT_S)
        self._total = made.histogram("request_seconds", "Time from request to end of answer", labels, _LATENCY_S)
        self._tokens = made.counter(
            "tokens", "Tokens by kind: prompt, cached (part of prompt), completion", (*labels, "kind")
        )
        self._decided = made.counter("decisions", "Decisions by chosen backend", ("policy", "backend"))
        self._transferred = made.counter(
            "transferred_tokens", "Prompt tokens by the source of their KV: cache, prefill", ("backend", "source")
        )
        self._reloads = made.counter("config_reloads", "SLA files read while running, by result", ("result",))
        self._config = made.gauge("config_info", "1 for the version of the SLA file that decides now", ("version",))
        self._waiting = made.gauge("queued", "Requests that wait in the router for room", ("service_class",))
        self._waking = made.gauge("pool_waiting", "Requests that wait for a pool that sleeps to start", ("pool",))
        self._queue_s = made.histogram(
            "queue_seconds", "Time from the arrival of a request until it is sent to a backend", labels, _LATENCY_S
        )
        self._misses = made.counter(
            "misses",
            "Predicted misses of a target, by the step of on_miss tried",
            ("service_class", "step"),
        )
        self._splits = made.counter(
            "split_requests", "Requests of rules with shares, by how they ended at a pool", ("rule", "pool", "how")
        )
        self._mirrored = made.counter(
            "mirrored_requests", "Requests of rules with mirrors, by how their copies ended", ("rule", "pool", "how")
        )
        self._shadow = made.counter(
            "shadow_differences", "Decisions by how the shadow file's decision differs, or none", ("what",)
        )
        self._estimate_error = made.histogram(
            "prompt_estimate_error",
            "|estimated - counted| / counted, of prompts with an estimated length",
            ("model",),
            _SHARES,
        )
        self._exact = made.gauge("replicas_exact", "1 if this router knows everything that the others reported", ())[()]
        self._others = made.gauge("replicas_heard", "Other routers that reported in the last seconds", ())[()]
        self._limited = made.counter(
            "http_limits", "Connections and requests that were refused or closed by a limit of the port", ("limit",)
        )
        self._connected = made.gauge("http_connections", "Connections of HTTP clients, by what they do", ("state",))
        self._events = made.counter("events", "Rare events, by name", ("event",))
        self._undecided = threading.Lock()
        self._lag = made.histogram("event_loop_lag_seconds", "How late the event loop woke a sleeper", (), _LAG_S)[()]
        self._worst_lag = made.gauge("event_loop_lag_max_seconds", "The worst lag since the start", ())[()]
        self.worst_lag_s = 0.0
        self._listeners: list[Listener] = []
        self.on_refused: Callable[[str, str], None] = lambda *_: None

    def __repr__(self) -> str:
        return f"<Telemetry, worst lag {self.worst_lag_s * 1000:.1f} ms>"

    @property
    def registry(self) -> CollectorRegistry:
        """All metrics, with what calls have told so far."""
        self.flush()
        return self._registry

    def flush(self) -> None:
        """Count what calls have told so far; from another thread than that of the calls nothing is done."""
        if isinstance(self.later, Later):
            self.later.flush()

    def listen(self, listener: Listener) -> None:
        """Pass all further events to `listener`."""
        self._listeners.append(listener)

    def account(self, id: str, context: Mapping[str, str] = _NO_CONTEXT) -> Account:  # noqa: A002
        """An Account that is counted once when the context is left, with the Outcome that ended it.

        `context` is the call's incoming trace context (W3C headers).
        """
        trace, headers, now = None, context, self._clock()
        if self._tracing is not None:
            trace, headers = self._tracing.call(id, context)
        wants_prompts = trace is not None or self.decisions is not None or now < self._recent.read_until
        return Account(id, now, headers, trace, self._ended, wants_prompts)

    def prompt(self, account: Account, *, config_version: str) -> PromptTrace | None:
        """The trace of the next prompt of a classified call; None if no trace, decision log or metric wants it."""
        trace = None if account.trace is None else account.trace.prompt()
        keep: list[Callable[[Ended], object]] = [] if self.decisions is None else [self.decisions.put]
        if self._clock() < self._recent.read_until:
            keep.append(self._keep_recent)
        if not keep:
            return trace
        assert account.rule is not None, f"{account!r} was not classified"
        return LoggedPrompt(
            trace,
            keep,
            with_keys=self.decisions is not None,
            clock=self._clock,
            unix_time=self._unix_time,
            arrived_at=account.started_at,
            rule=account.rule,
            config=config_version,
            trace_id=None if account.trace is None else account.trace.ids.trace_id,
        )

    def _keep_recent(self, ended: Ended) -> None:
        self.later(self._recent.put, ended)

    def decided(
        self,
        request: Request,
        decision: Decision,
        chosen: BackendView | None,
        *,
        config_version: str = "",
        waited_s: float | None = None,
    ) -> None:
        """Record one Decision: chosen, dropped, the scores, and the age of the chosen backend's report.

        `config_version` names the SLA file that decided. The request was placed after `waited_s` in the router, None:
        it was placed before, or is not.
        """
        self.later(self._count_decision, request, decision, self._clock(), waited_s)
        if _decisions.isEnabledFor(logging.INFO):
            facts = {"request": request.id, "tenant": request.tenant, "service_class": request.service_class}
            facts["config_version"] = config_version
            sizes = {"prompt_tokens": request.prompt_tokens, "view_age_s": chosen and chosen.reported_s_ago}
            _decisions.info(LogFields({**facts, **sizes, **msgspec.to_builtins(decision)}))

    def _count_decision(self, request: Request, decision: Decision, at: float, waited_s: float | None) -> None:
        if waited_s is not None:
            self._queue_s[request.tenant, request.service_class].observe(waited_s)
        self._decided[decision.policy, decision.chosen or "none"].inc()
        if decision.fetch is not None:
            self._transferred[decision.chosen or "none", "cache"].inc(decision.fetch.tokens)
        if decision.prefill is not None:
            self._transferred[decision.chosen or "none", "prefill"].inc(request.prompt_tokens)
        for listener in self._listeners:
            listener.decided(request, decision, at)

    def config(self, version: str) -> None:
        """The SLA file of this `version` is in effect now."""
        for other in tuple(self._config):
            self._config.forget(0, str(other))
        self._config[version].set(1)

    def reloaded(self, *, accepted: bool) -> None:
        """A changed SLA file was read, and took effect or was rejected."""
        self._reloads["accepted" if accepted else "refused"].inc()

    def waiting(self, service_class: str, count: int) -> None:
        """`count` requests of the class wait for room."""
        self._waiting[service_class].set(count)

    def waking(self, pool: str, count: int) -> None:
        """`count` requests wait for `pool` to start."""
        self._waking[pool].set(count)

    def refused(self, address: str, error: ExpectedError) -> None:
        self.on_refused(address, error.message)

    def estimated(self, model: str, error: float) -> None:
        """A backend counted the tokens of a prompt of `model`; the estimate was off by this share of the count."""
        self._estimate_error[model].observe(error)

    def doubted(self, backend: str, what: UsageDoubt) -> None:
        self.backends.doubted(backend, what)

    def missed(self, service_class: str, step: str) -> None:
        """A target of the class is predicted to be missed, and this step of `on_miss` is tried."""
        self._misses[service_class, step].inc()
        for listener in self._listeners:
            listener.missed(service_class, step)

    def undecided(self, count: int) -> None:
        """`count` lines of the decision log were dropped. Safe from any thread."""
        with self._undecided:
            self._events["decision_log_dropped"].inc(count)

    def split(self, rule: int, pool: str, how: str) -> None:
        """A request of rule number `rule`, which has shares, ended so at `pool`: kept, missed or failed."""
        self._splits[str(rule), pool, how].inc()

    def mirrored(self, rule: int, pool: str, how: str) -> None:
        """A request of rule number `rule` was mirrored to `pool`: answered or failed; or left out for lack of room."""
        self._mirrored[str(rule), pool, how].inc()

    def shadowed(self, request: Request, differences: Sequence[Difference]) -> None:
        """Count how the shadow file's decision for `request` differs."""
        for what in [difference.what for difference in differences] or ["none"]:
            self._shadow[what].inc()
        if differences and _shadows.isEnabledFor(logging.INFO):
            _shadows.info(LogFields({"request": request.id, "differences": msgspec.to_builtins(differences)}))

    def replicas(self, exact: bool, others: int) -> None:
        """Whether this router knows everything that the others reported, and how many others there are."""
        self._exact.set(int(exact))
        self._others.set(others)

    def compared(self, backend: str, what: Doubt, *, is_equal: bool) -> None:
        """Count one comparison of an answer or event of `backend` with the router's own computation."""
        self.backends.compared(backend, what, is_equal=is_equal)

    def trusted(self, report: ParityReport) -> None:
        """Log a change of trust in the events of a backend, or of its reason."""
        self.backends.trusted(report)
        about = f"{report.backend}, model '{report.model}'"
        if report.trust is Trust.BROKEN:
            self.event("parity_broken")
            _parity.warning(
                "%s: %s; its cache events, if it sends any, are not used for this model", about, report.reason
            )
        elif report.trust is Trust.PROVEN:
            self.event("parity_proven")
            also = f", but {report.reason}" if report.reason else ""
            _parity.info("%s: its cache events agree with the router's computation%s", about, also)

    def limited(self, limit: str) -> None:
        """A connection or request was refused or closed by this limit."""
        self._limited[limit].inc()

    def connected(self, *, waiting: int, served: int) -> None:
        """So many HTTP clients are connected: on `waiting` connections no request runs."""
        self._connected["waiting"].set(waiting)
        self._connected["served"].set(served)

    def event(self, name: str) -> None:
        """Count a rare event. `name` comes from a closed list."""
        self._events[name].inc()

    async def measure_lag(self, every_s: float = 0.05, *, tell: Callable[[float], None] = lambda _: None) -> None:
        """Measure how late the event loop is, and `tell` it, until cancelled. It sees every halt of more than
        `every_s`."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(every_s)
            late_s = max(0.0, time.perf_counter() - before - every_s)
            self.lagged(late_s)
            tell(late_s)

    def lagged(self, seconds: float) -> None:
        """The loop woke a sleeper `seconds` late."""
        self._lag.observe(seconds)
        if seconds > self.worst_lag_s:
            self.worst_lag_s = seconds
            self._worst_lag.set(seconds)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics, and their content type: OpenMetrics with exemplars if `accept` allows it, else Prometheus' text.

        Slow with many series (55 ms for 600): call it in a thread, after `flush`.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _ended(self, account: Account, failure: BaseException | None) -> None:
        now, labels, usage = self._clock(), (account.tenant, account.service_class), account.usage
        outcome, code, trace = Outcome.FINISHED, "finished", account.trace
        if failure is not None:
            outcome, code = outcome_of(failure), code_of(failure)
        self.later(self._count, account, outcome, code, failure is not None, now)
        ids = None if trace is None else trace.ids
        if trace is not None:
            asked = (account.path, account.model)
            trace.end(Answered(outcome, code, *asked, *labels, account.rule, usage, account.inputs))
        if _outcomes.isEnabledFor(logging.INFO):
            facts = {"request": account.id, "tenant": labels[0], "service_class": labels[1], "model": account.model}
            end = {"outcome": outcome.value, "code": code, "seconds": round(now - account.started_at, 6)}
            found = {} if ids is None else ids._asdict()
            found |= {} if (why := why_of(failure)) is None else {"error": why}
            _outcomes.info(LogFields({**facts, **end, **msgspec.to_builtins(usage), **found}))

    def _count(self, account: Account, outcome: Outcome, code: str, is_refused: bool, now: float) -> None:
        labels, usage, trace = (account.tenant, account.service_class), account.usage, account.trace
        for listener in self._listeners:
            listener.ended(account, outcome, code, now)
        self._requests[*labels, str(outcome)].inc()
        if is_refused:
            self._refusals[code].inc()
        self._total[labels].observe(now - account.started_at)
        if account.first_at is not None and account.last_at is not None:
            exemplar = None if trace is None else trace.ids._asdict()
            self._ttft[labels].observe(account.first_at - account.started_at, exemplar)
            if usage.completion_tokens > 1:
                spread = (account.last_at - account.first_at) / (usage.completion_tokens - 1)
                self._tpot[labels].observe(spread)
        self._tokens[*labels, "prompt"].inc(usage.prompt_tokens)
        if usage.cached_tokens:
            # zero could mean that the backend does not report cached tokens; without a series it is clear
            self._tokens[*labels, "cached"].inc(usage.cached_tokens)
        if usage.blended_tokens:
            self._tokens[*labels, "blended"].inc(usage.blended_tokens)
        self._tokens[*labels, "completion"].inc(usage.completion_tokens)
