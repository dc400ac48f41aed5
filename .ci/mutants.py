"""Change the code at random and see whether a test notices: `make mutants`.

Each mutant is one change (`.ci/mutations.py`), drawn with a seed, in a copy of the tree. The test file of the same name
runs first, then the others of that folder, then files of other folders that import the changed module, nearest first,
until a test fails: the mutant is killed. One that survives is shown as a diff. Results are kept in
build/mutants/SEED.json, and a later call with the same seed goes on there. `.ci/equivalent.yaml` lists changes that no
test can notice, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build/mutants"
PACKAGES = ("policies", "router", "backends", "shards", "http1", "simulation")

NOT_MUTATED = ("shards/bundled/", "shards/gpu/", "shards/kernels/", "shards/__main__.py")
"""The training of the bundled model, and code that only runs on a GPU or in a process of its own."""

NOT_RUN = tuple(
    f"tests/{folder}/"
    for folder in (
        "chaos",
        "clients",
        "docs",
        "engines",
        "helm",
        "house",
        "shards/bundled",
        "shards/gpu",
        "shards/kernels",
    )
)
"""Tests that start other programs, look at files or need a GPU; they say little about one line, or are slow."""

HEAVY = (
    *("aiohttp", "dns.asyncresolver", "google.protobuf.message", "grpc.aio", "grpc_health.v1.health", "httptools"),
    *("hypothesis", "jinja2", "msgspec", "numpy", "opentelemetry.sdk.trace", "prometheus_client", "pydantic"),
    *("pytest_asyncio", "pytest_timeout", "redis.asyncio", "rich.console", "tokenizers", "typer", "uvloop"),
    *("xxhash", "yaml", "zmq.asyncio"),
)
"""What tests import of other projects. It is imported once here, and forked processes have it at once."""

OPTIONS = (
    *("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
GUESS_S = 3.0
MEMORY = 12 << 30


class Suite:
    """The tests, the modules that each file of them imports, and the seconds that each took."""

    def __init__(self, root: Path, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        files = [file for folder in (*PACKAGES, "tests") for file in sorted((root / folder).rglob("*.py"))]
        names = {".".join(file.relative_to(root).with_suffix("").parts): file for file in files}
        paths = {name: file.relative_to(root).as_posix() for name, file in names.items()}
        self._imports = {
            paths[name]: [paths[other] for other in _imported(file, paths)] for name, file in names.items()
        }
        self.files = [
            path
            for path in self._imports
            if path.startswith("tests/") and "/test_" in path and not path.startswith(NOT_RUN)
        ]
        self._distances = {test: self._from(test) for test in self.files}

    def _from(self, test: str) -> dict[str, int]:
        """The number of imports between this test file and each module that it reaches."""
        found, waiting = {test: 0}, deque([test])
        while waiting:
            here = waiting.popleft()
            for module in self._imports[here]:
                if module not in found:
                    found[module] = found[here] + 1
                    waiting.append(module)
        return found

    def expected_s(self, files: Iterable[str]) -> float:
        """How long these test files take, by their last run."""
        return sum(self.seconds.get(file, GUESS_S) for file in files)

    def stages(self, module: str, wide_s: float) -> list[list[str]]:
        """Test files for a mutant of this module: of its name, of its folder, and others for `wide_s` seconds."""
        folder, _, name = f"tests/{module}".rpartition("/")
        own = [test for test in self.files if test == f"{folder}/test_{name}"]
        reaching = [test for test in self.files if module in self._distances[test] and test not in own]
        reaching.sort(key=lambda test: (self._distances[test][module], self.expected_s([test])))
        beside = [test for test in reaching if test.rpartition("/")[0] == folder]
        wide: list[str] = []
        for test in reaching:
            if test not in beside and self.expected_s([*wide, test]) <= wide_s:
                wide.append(test)
        return [stage for stage in (own, beside, wide) if stage]


def _imported(file: Path, known: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        yield from (name for name in names if name in known)


class Watcher:
    """A plugin of pytest that notes how long each file took, and the tests that passed and failed."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.passed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest: a test's setup, call or end is over."""
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """See pytest: a file was read."""
        if report.failed:
            self.failed.append(report.nodeid)


class Copy:
    """A copy of the tree, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._sources: dict[str, str] = {}
        self._writes = 0

    def write(self, mutation: Mutation | None, file: str) -> None:
        """Put the mutant into the file, or the original for None."""
        path = self.folder / file
        source = self._sources.setdefault(file, path.read_text())
        path.write_text(mutation.applied(source) if mutation else source)
        # Python compares whole seconds to see whether compiled code is old
        self._writes += 1
        os.utime(path, (self._writes, self._writes))


class Process:
    """A forked process that runs tests in a copy."""

    def __init__(self, copy: Copy, tests: list[str], limit_s: float, *, stop: bool = True) -> None:
        self._report, self._output = copy.folder / "report.json", copy.folder / "output.txt"
        self._report.unlink(missing_ok=True)
        self.until = time.monotonic() + limit_s
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _run(copy.folder, tests, self._report, self._output, stop=stop)
            finally:
                os._exit(70)

    def ended(self) -> dict[str, Any] | None:
        """What came out: `failed` (tests; empty if all passed) and `seconds` of each file. None while it runs."""
        over = time.monotonic() > self.until
        if over:
            self.kill()
        pid, _ = os.waitpid(self.pid, 0 if over else os.WNOHANG)
        if pid == 0:
            return None
        self.kill()
        if over:
            return {"failed": ["the limit of time"], "passed": []}
        try:
            report: dict[str, Any] = json.loads(self._report.read_text())
        except (OSError, ValueError):
            report = {"failed": ["the process ended"], "passed": []}
        if report.get("status") not in (0, 5) and not report["failed"]:
            report["failed"] = [f"pytest ended with {report.get('status')}"]
        return report

    def kill(self) -> None:
        """End it, and the programs that its tests started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _run(folder: Path, tests: list[str], report: Path, output: Path, *, stop: bool) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(5)
    # a mutant may allocate without end
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / ".ci"))]
    os.environ["PYTHONPATH"] = str(folder)
    watcher = Watcher()
    status = pytest.main([*(OPTIONS if stop else OPTIONS[1:]), *tests], plugins=[watcher])
    report.write_text(json.dumps({"status": int(status), **vars(watcher)}))
    os._exit(0)


@dataclass
class Result:
    """How a mutant fared. `by` is the test that failed, and `stage` counts the sets of tests that ran."""

    file: str
    line: int
    kind: str
    diff: str
    key: str
    status: str
    by: str = ""
    stage: int = 0
    seconds: float = 0.0
    is_confirmed: bool = False


@dataclass
class Trial:
    """One mutant in one copy, while tests run."""

    mutation: Mutation
    copy: Copy
    stages: list[list[str]]
    stage: int = 0
    began: float = field(default_factory=time.monotonic)
    process: Process | None = None


class Hunt:
    """Runs tests on mutants, as many at a time as there are copies, and keeps the results in a file."""

    def __init__(self, suite: Suite, copies: list[Copy], kept: Path, wide_s: float) -> None:
        self.suite, self.copies, self._kept, self._wide_s = suite, copies, kept, wide_s
        self.results: dict[str, Result] = {}
        if kept.exists():
            self.results = {result["key"]: Result(**result) for result in json.loads(kept.read_text())}

    def save(self) -> None:
        """Write results and durations to the files that they are kept in."""
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        self._kept.write_text(json.dumps([asdict(result) for result in self.results.values()], indent=1))
        (self._kept.parent / "seconds.json").write_text(json.dumps(self.suite.seconds, indent=1))

    def run(self, drawn: list[Mutation], until: float) -> None:
        """Try these, until all are done or the monotonic clock shows `until`."""
        waiting = deque(mutation for mutation in drawn if mutation.key not in self.results)
        done = len(drawn) - len(waiting)
        free, running = list(self.copies), list[Trial]()
        try:
            while running or (waiting and time.monotonic() < until):
                while free and waiting and time.monotonic() < until:
                    running.append(self._begin(waiting.popleft(), free.pop()))
                for trial in list(running):
                    if result := self._go_on(trial):
                        running.remove(trial)
                        free.append(trial.copy)
                        trial.copy.write(None, trial.mutation.file)
                        self.results[result.key] = result
                        done += 1
                        print(_line(done, len(drawn), result), flush=True)
                        self.save()
                time.sleep(0.02)
        finally:
            for trial in running:
                if trial.process:
                    trial.process.kill()

    def _begin(self, mutation: Mutation, copy: Copy) -> Trial:
        copy.write(mutation, mutation.file)
        return Trial(mutation, copy, self.suite.stages(mutation.file, self._wide_s))

    def _go_on(self, trial: Trial) -> Result | None:
        """Start the trial's next stage if one has ended. Returns its result once there is one."""
        by = ""
        if trial.process is not None:
            report = trial.process.ended()
            if report is None:
                return None
            by = next(iter(report["failed"]), "")
            if not by:
                self.suite.seconds.update(report["seconds"])
                trial.stage += 1
        if not by and trial.stage < len(trial.stages):
            tests = trial.stages[trial.stage]
            trial.process = Process(trial.copy, tests, 60.0 + 5 * self.suite.expected_s(tests))
            return None
        mutation, took_s = trial.mutation, round(time.monotonic() - trial.began, 1)
        said = (mutation.file, mutation.line, mutation.kind, mutation.diff, mutation.key)
        return Result(*said, "killed" if by else "survived", by, trial.stage + bool(by), took_s)

    def confirm(self) -> None:
        """Run the tests that killed mutants on the unchanged code: a mutant whose test fails there too is in doubt."""
        new = [result for result in self.results.values() if ".py" in result.by and not result.is_confirmed]
        # what the parameters of a test are called may depend on the mutant
        tests = {result.by: result.by.partition("[")[0] for result in new}
        if not tests:
            return
        process = Process(self.copies[0], sorted(set(tests.values())), 120.0 + 5 * len(tests), stop=False)
        while (report := process.ended()) is None:
            time.sleep(0.1)
        for result in new:
            test = tests[result.by]
            passed, failed = (any(_is_of(test, name) for name in report[how]) for how in ("passed", "failed"))
            result.status = "killed" if passed and not failed else "in doubt"
            result.is_confirmed = True
        self.save()


def _is_of(test: str, name: str) -> bool:
    """Whether this is the test, one of its cases, or a test of this file."""
    return name == test or name.startswith((f"{test}[", f"{test}::"))


def _line(done: int, count: int, result: Result) -> str:
    by = f" by {result.by}" if result.by else ""
    shown = f"[{done:3}/{count}] {result.status:8} {result.file}:{result.line} {result.kind}{by}, {result.seconds} s"
    return shown if result.by else f"{shown}\n{result.diff}"


def drawn(seed: int, count: int, packages: Iterable[str]) -> list[Mutation]:
    """The first `count` mutations of these packages in the order of the seed, without those that are known."""
    places = [ROOT / package for package in packages]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    paths = {file.relative_to(ROOT).as_posix(): file for file in files if "_pb2" not in file.name}
    every = [
        mutation
        for path, file in paths.items()
        if not path.startswith(NOT_MUTATED)
        for mutation in mutations(path, file.read_text())
    ]
    return sorted(every, key=lambda mutation: mutation.rank(seed))[:count]


def equivalent() -> dict[tuple[str, str, str], str]:
    """The reason why no test can notice a change, by its file, removed and added lines."""
    listed = yaml.safe_load((ROOT / ".ci/equivalent.yaml").read_text()) or []
    return {(entry["file"], entry["removed"].strip(), entry["added"].strip()): entry["reason"] for entry in listed}


def changes_nothing(mutation: Mutation, known: dict[tuple[str, str, str], str]) -> bool:
    """Whether the change is among the known ones that no test can notice."""
    return (mutation.file, mutation.removed.strip(), mutation.added.strip()) in known


def summary(results: Iterable[Result], count: int, idle: int) -> str:
    """How many were killed, by package, and those that were not."""
    results = list(results)
    lines = []
    for package in PACKAGES:
        of_it = Counter(result.status for result in results if result.file.startswith(f"{package}/"))
        if of_it:
            lines.append(
                f"  {package:<11} " + ", ".join(f"{status} {number}" for status, number in sorted(of_it.items()))
            )
    lines += [
        f"\n{result.status}: {result.file}:{result.line} ({result.kind}) {result.by}\n{result.diff}"
        for result in results
        if result.status != "killed"
    ]
    killed = sum(result.status == "killed" for result in results)
    lines.append(
        f"\n{killed} of {len(results)} killed ({killed / max(1, len(results)):.1%}); {idle} more of {count} are known"
        f" to change nothing, {count - idle - len(results)} are left"
    )
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if all mutants were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="packages, folders or files; default: all")
    parser.add_argument("--seed", type=int, help="draws the mutations; default: a new one")
    parser.add_argument("--count", type=int, default=200, help="mutations to draw")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after this time")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--wide", type=float, default=20.0, help="seconds of tests of other folders")
    parser.add_argument("--again", action="store_true", help="try mutants again that were not killed")
    asked = parser.parse_args()
    # so that the copies are removed then
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seed = asked.seed if asked.seed is not None else random.randrange(1_000_000)
    print(f"Seed {seed}: mutations of {', '.join(asked.packages)} are drawn ...", flush=True)
    known = equivalent()
    chosen = drawn(seed, asked.count, asked.packages)
    tried = [mutation for mutation in chosen if not changes_nothing(mutation, known)]
    seconds = RESULTS / "seconds.json"
    suite = Suite(ROOT, json.loads(seconds.read_text()) if seconds.exists() else {})
    for name in (*HEAVY, "torch") if any(mutation.file.startswith("shards/") for mutation in tried) else HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = []
        for number in range(asked.jobs):
            (place := Path(folder) / str(number)).mkdir()
            copies.append(Copy(place))
        hunt = Hunt(suite, copies, RESULTS / f"{seed}.json", asked.wide)
        hunt.results = {
            mutation.key: hunt.results[mutation.key]
            for mutation in tried
            if mutation.key in hunt.results and not (asked.again and hunt.results[mutation.key].status != "killed")
        }
        hunt.run(tried, time.monotonic() + 60 * asked.minutes)
        hunt.confirm()
    print(summary(hunt.results.values(), len(chosen), len(chosen) - len(tried)))
    return any(result.status != "killed" for result in hunt.results.values())


if __name__ == "__main__":
    sys.exit(main())
