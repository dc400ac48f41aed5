"""`pointsman simulate`: from files to a report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from policies.errors import InvalidRequest
from policies.quantities import written_seconds
from policies.sla.config import Config
from router.terminal import inert_console
from simulation.arrivals import Arrival, settled, sped_up, usual_of
from simulation.fleet import Fleet, fleet_of
from simulation.replay import Then, agreement, read_log
from simulation.report import as_json, compared, difference, shown, tables
from simulation.run import Progress as OnProgress
from simulation.run import simulate
from simulation.sizing import Trial, find_backends
from simulation.speed import machines_of, read_profile
from simulation.summary import Summary, summary_of
from simulation.trace import read_trace


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line's options; `file` and `against` are SLA files by name, `counts` backends by pool.

    With `against_profile` the second simulation has this profile, and the same file if there is no `against`.
    """

    file: tuple[str, Config]
    against: tuple[str, Config] | None = None
    trace: Path | None = None
    decisions: Path | None = None
    profile: Path | None = None
    against_profile: Path | None = None
    counts: Mapping[str, int] | None = None
    speed: float = 1.0
    most: int | None = None
    tenant: str | None = None
    model: str | None = None
    seed: int = 0
    find: str | None = None
    json: Path | None = None
    log: Path | None = None

    @property
    def is_for_machines(self) -> bool:
        """Whether standard output has only JSON."""
        return str(self.json) == "-"


@dataclass(frozen=True, slots=True)
class _Coming:
    """The arrivals as read, before tenants and models are resolved; `then` has a log's decisions."""

    arrivals: Sequence[Arrival]
    then: Mapping[str, Then]
    guessed: int = 0


def run(wanted: Wanted) -> None:
    """Simulate, and print or write the results. Raises InvalidRequest and ConfigError."""
    coming = _coming(wanted)
    if wanted.profile is None:
        print("note: no --profile, so each backend is an 8B model on one H200", file=sys.stderr)  # noqa: T201
    if wanted.find is not None:
        _find(wanted, wanted.find, coming)
        return
    named = {name: _simulated(name, config, wanted, coming, profile) for name, config, profile in _cases(wanted)}
    if wanted.json is not None:
        _write(wanted.json, as_json(_document(named)))
    if not wanted.is_for_machines:
        _print(shown(tables(next(iter(named.values()))) if len(named) == 1 else compared(named)))


def _document(named: Mapping[str, Summary]) -> dict[str, object]:
    summaries = list(named.values())
    document: dict[str, object] = {"runs": [{"file": name, **_fields(summary)} for name, summary in named.items()]}
    if len(summaries) == 2:
        document["difference"] = difference(*summaries)
    return document


def _fields(summary: Summary) -> dict[str, object]:
    return {name: getattr(summary, name) for name in summary.__struct_fields__}


def _cases(wanted: Wanted) -> list[tuple[str, Config, Path | None]]:
    """What is simulated: its name, file and profile."""
    (name, config), profile = wanted.file, wanted.profile
    if wanted.against is None and wanted.against_profile is None:
        return [(name, config, profile)]
    other, other_config = wanted.against or wanted.file
    other_profile = wanted.against_profile or profile
    if other == name:
        if other_profile == profile:
            raise InvalidRequest("--against is the same file", hint="give another file or profile to compare with")
        name, other = f"{name} with {profile or 'no profile'}", f"{name} with {other_profile}"
    return [(name, config, profile), (other, other_config, other_profile)]


def _coming(wanted: Wanted) -> _Coming:
    if (wanted.trace is None) == (wanted.decisions is None):
        raise InvalidRequest("there are no requests to simulate", hint="give --trace FILE or --decisions FILE")
    if wanted.trace is not None:
        return _Coming(sped_up(read_trace(wanted.trace, most=wanted.most), wanted.speed), {})
    assert wanted.decisions is not None, "one of the two options is given"
    log = read_log(wanted.decisions, most=wanted.most)
    return _Coming(sped_up(log.arrivals, wanted.speed), log.then, log.guessed)


def _simulated(name: str, config: Config, wanted: Wanted, coming: _Coming, profile: Path | None) -> Summary:
    fleet, arrivals = _prepared(config, wanted, coming, profile)
    with _progress(name, len(arrivals)) as on_progress:
        done = simulate(config, fleet, arrivals, seed=wanted.seed, on_progress=on_progress, log=wanted.log)
    agreed = agreement(done.calls, coming.then) if coming.then else None
    return summary_of(done, agreed, guessed=coming.guessed)


def _prepared(config: Config, wanted: Wanted, coming: _Coming, profile: Path | None) -> tuple[Fleet, list[Arrival]]:
    """The backends of `config`, and the arrivals with its tenants and models. Raises InvalidRequest with the line."""
    machines = machines_of(config, read_profile(profile, config) if profile else {})
    asked_for = [arrival.model for arrival in coming.arrivals if arrival.model is not None]
    fleet = fleet_of(config, machines, counts=wanted.counts or {}, asked_for=asked_for)
    models = fleet.models(config)
    usual = usual_of(config, models, tenant=wanted.tenant, model=wanted.model)
    source, arrivals = wanted.trace or wanted.decisions, []
    for arrival in coming.arrivals:
        try:
            arrivals.append(settled(arrival, config, models, usual))
        except InvalidRequest as error:
            raise InvalidRequest(f"{source}:{arrival.line}: {error.message}", hint=error.hint) from error
    return fleet, arrivals


def _find(wanted: Wanted, pool: str, coming: _Coming) -> None:
    name, config = wanted.file
    fleet, arrivals = _prepared(config, wanted, coming, wanted.profile)
    trials: list[Trial] = []

    def tell(trial: Trial) -> None:
        trials.append(trial)
        if not wanted.is_for_machines:
            _print(_trial_line(pool, trial))

    with _progress(name, None) as on_progress:
        found = find_backends(pool, config, fleet, arrivals, seed=wanted.seed, on_trial=tell, on_progress=on_progress)
    if wanted.json is not None:
        tried = [{"count": trial.backends, **_fields(trial.summary)} for trial in trials]
        _write(wanted.json, as_json({"pool": pool, "found": found.backends, "trials": tried}))
    if not wanted.is_for_machines:
        _print(f"\n{found.backends} in '{pool}' meet every target:\n")
        _print(shown(tables(found.summary)))


def _trial_line(pool: str, trial: Trial) -> str:
    classes = []
    for row in trial.summary.classes:
        if row.keeps is None:
            continue
        parts = [f"missed {row.missed:.1%}"] if row.missed is not None else []
        parts += [f"slow {row.slow:.1%}"] if row.slow is not None else []
        ttft = f", TTFT P95 {written_seconds(round(row.ttft_s.p95, 3))}" if row.ttft_s else ""
        classes.append(f"{row.name} {'✓' if row.keeps else '✗'} {', '.join(parts)}{ttft}")
    return f"{trial.backends:>4} in '{pool}'  {'; '.join(classes)}"


@contextmanager
def _progress(name: str, total: int | None) -> Iterator[OnProgress]:
    """A progress line on a terminal; nothing elsewhere."""
    console = inert_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)

        def on_progress(ended: int, seconds: float) -> None:
            if not ended % 64:
                bar.update(task, completed=ended, description=f"{name}, {seconds:,.0f} s")

        yield on_progress


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is what the command is for
