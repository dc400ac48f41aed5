"""Real engines, started once for all tests that want them alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.engines.programs import (
    MISSING,
    PLAIN,
    VLLM,
    LlamaServer,
    Program,
    VLLMOptions,
    a_llama_server,
    a_vllm,
    preloaded_vllm,
)

STARTS_THEIR_OWN = {"test_faults", "test_lora", "test_prefill_decode", "test_quantised", "test_ranks"}
"""Files whose engines no other file uses."""


class TwoGroups(LoadScopeScheduling):
    """Gives one worker of pytest-xdist all files that share engines, and another one those that start their own."""

    def _split_scope(self, nodeid: str) -> str:
        return "own" if Path(nodeid.partition("::")[0]).stem in STARTS_THEIR_OWN else "shared"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> TwoGroups:
    return TwoGroups(config, log)


class Engines:
    """Programs that run until the session ends; those of the same name and options are started once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._vllm: dict[tuple[str, VLLMOptions], VLLM] = {}
        self._llama: LlamaServer | None = None

    @property
    def programs(self) -> list[Program]:
        """All that were started."""
        return [*self._vllm.values(), *([self._llama] if self._llama else [])]

    def begin(self, name: str, options: VLLMOptions) -> None:
        """Start this vLLM, if it was not; `vllm` waits for it. Several start side by side."""
        if (name, options) not in self._vllm:
            self._vllm[name, options] = a_vllm(f"vllm-{name}-{len(self._vllm)}", self.folder, options)
            self._vllm[name, options].start()

    def vllm(self, *names: str, options: VLLMOptions = PLAIN) -> list[VLLM]:
        """A vLLM for each name, all with `options`, their caches empty. Those that are new start side by side."""
        for name in names:
            self.begin(name, options)
        asked = [self._vllm[name, options] for name in names]
        for each in asked:
            if not each.is_started:
                # a test that failed had ended it
                each.start()
            each.wait_until_ready()
            each.forget_prefixes()
        return asked

    def llama_server(self) -> LlamaServer:
        """A llama-server with two slots."""
        if self._llama is None:
            self._llama = a_llama_server("llama-server", self.folder)
            self._llama.start()
        self._llama.wait_until_ready()
        return self._llama

    def stop(self) -> None:
        """End them all."""
        for each in self.programs:
            each.stop()


@pytest.fixture(scope="session", autouse=True)
def imported() -> Iterator[None]:
    """What vLLM imports, once for all that are started."""
    with nullcontext() if MISSING else preloaded_vllm():
        yield


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if MISSING:
        pytest.skip(MISSING)
    started = Engines(tmp_path_factory.mktemp("engines"))
    try:
        yield started
    finally:
        started.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show what the engines wrote last beside a test that failed."""
    report = yield
    started = getattr(item, "funcargs", {}).get("engines")
    if report.failed and isinstance(started, Engines):
        for each in started.programs:
            report.sections.append((f"the end of {each.log}", each.log_tail()))
    return report
