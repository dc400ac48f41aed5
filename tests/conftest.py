"""Settings for every test, made before torch or transformers are imported, and the tests that run without them."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest
from hypothesis import settings

from tests import account

# waiting OpenMP threads would spin on cores that other tests need: seen to cost a factor of ten
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# how long one example takes depends on what else the machine does
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

WITHOUT_TORCH = frozenset({"torch", "llguidance", "transformers", "triton"})
"""Packages that `--without-torch` assumes to be missing."""

LIMIT_S = {
    "benchmarks": 300,
    "chaos": 300,
    "clients": 300,
    "docs": 300,
    "e2e": 180,
    "engines": 900,
    "helm": 180,
    "house": 300,
    "models": 900,
    "shards/gpu/test_benchmark.py": 900,
    "shards/gpu/test_interpreted.py": 900,
    "shards/kernels/test_ahead_of_time.py": 900,
    "shards/kernels/test_interpreted.py": 900,
}
"""Seconds for one test of these folders and files, which run other programs. The rest: `timeout` of pyproject.toml.

Their tests take longest and so come first."""


STATE = tempfile.TemporaryDirectory(prefix="pointsman-state-")
"""Routers that tests start as a user does keep their state in here, and not in the home of that user."""

os.environ.pop("STATE_DIRECTORY", None)
os.environ["XDG_STATE_HOME"] = STATE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-torch", action="store_true", help="leave out what needs torch or transformers")
    parser.addoption("--at-least", type=int, default=0, metavar="TESTS", help="fail if fewer tests pass")
    parser.addoption("--account", type=Path, metavar="FILE", help="write what ran, was skipped and failed, as JSON")
    parser.addoption("--random-order", type=int, metavar="SEED", help="shuffle the files, and the tests of each file")
    parser.addoption(
        "--one-of-each", action="store_true", help="of tests with parameters only those with the first ones"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("without_torch"):
        conftest = collection_path / "conftest.py"
        return True if conftest.exists() and "import torch\n" in conftest.read_text() else None
    return None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if parent.config.getoption("without_torch"):
        module: TorchFree = TorchFree.from_parent(parent, path=module_path)
        return module
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt all tests and what they import from garbage collection: a million objects, which every full one scans."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    # As the interpreter ends it collects what modules held; spared objects would be freed after the libraries that they
    # need, which has crashed other projects' processes when all tests had passed.
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests, places = Path(__file__).parent, list(LIMIT_S)
    by_file: dict[Path, int] = {}
    for path in {item.path for item in items}:
        inside = (at for at, place in enumerate(places) if path.is_relative_to(tests / place))
        by_file[path] = next(inside, len(places))
    for item in items:
        at = by_file[item.path]
        if at < len(places) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S[places[at]]))
    if config.getoption("one_of_each"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        config.hook.pytest_deselected(
            items=[each for each in items if first[each.nodeid.partition("[")[0]] is not each]
        )
        items[:] = first.values()
    # in the order of LIMIT_S, and then the rest
    items.sort(key=lambda item: by_file[item.path])
    if (seed := config.getoption("random_order")) is not None:
        draw = random.Random(seed)
        files = {path: draw.random() for path in sorted({item.path for item in items})}
        draw.shuffle(items)
        # tests of a file stay together, for fixtures that they share
        items.sort(key=lambda item: files[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # what a router of one test has counted is no concern of those of another one
    os.environ["XDG_STATE_HOME"] = f"{STATE.name}/{hashlib.sha256(item.nodeid.encode()).hexdigest()[:12]}"
    if item.config.getoption("without_torch") and item.get_closest_marker("torch"):
        pytest.skip("needs torch")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed = len(terminalreporter.stats.get("passed", ()))
    if passed < config.getoption("at_least"):
        terminalreporter.write_line(f"only {passed} tests passed, of at least {config.getoption('at_least')}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    STATE.cleanup()
    if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist, which may outlive a run that was killed
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    if len(reporter.stats.get("passed", ())) < session.config.getoption("at_least"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    if (file := session.config.getoption("account")) is not None:
        account.write(file, account.account_of(reporter, int(session.exitstatus)))


class TorchFree(pytest.Module):
    """A module that is skipped if it imports what is not there without torch."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            if isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] in WITHOUT_TORCH:
                pytest.skip(f"needs {cause.name}", allow_module_level=True)
            raise
