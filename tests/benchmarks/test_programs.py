"""Each program for measurements and each example shows its help, is on a page, and ends what it has started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORKED = Path(__file__).with_name("forked.py")
FILES = {
    file.relative_to(ROOT).as_posix(): file.read_text()
    for pattern in ("benchmarks/*.py", "benchmarks/*_parts/*.py", "examples/*/*.py")
    for file in ROOT.glob(pattern)
}
WORKERS = "benchmarks/cpu_parts/"
"""Programs that another one starts, in environments of other engines."""

PROGRAMS = sorted(
    name for name, text in FILES.items() if '__name__ == "__main__"' in text and not name.startswith(WORKERS)
)
TINY = {
    "benchmarks/board_cost.py": "--calls 20",
    "benchmarks/identity.py": "--calls 2 --rounds 2",
    "benchmarks/index_soak.py": "--backends 2 --hours 0.01",
    "benchmarks/scheduler.py": "--seconds 8 --chats 4 --long-tokens 4000 --every 3",
    "benchmarks/simulated_engine.py": "--requests 3 --rounds 1",
    "benchmarks/telemetry.py": "--calls 2 --rounds 2",
    "examples/capacity/make_trace.py": "",
}
"""Program -> arguments with which it does all that it does, in a second or two of CPU."""

SERVING = re.compile(r'"(serve|up)", str\(')
STATELESS = re.compile(r"""state: off|"state": "off"|"state": str\(folder|"STATE_DIRECTORY": """)
STARTING = re.compile(r"Popen\(|create_subprocess_exec\(|a_vllm\(|Program\(|router_programs import")

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
PAGES += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("README.md")]


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """Command line -> its status and output."""
    commands = [[program, "--help"] for program in PROGRAMS]
    commands += [[program, *words.split()] for program, words in TINY.items()]
    done = subprocess.run(
        [sys.executable, str(FORKED)],
        input=json.dumps(commands),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {" ".join(command): (status, output) for command, (status, output) in zip(commands, results, strict=True)}


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_shows_its_help(program: str, ended: dict[str, tuple[int, str]]) -> None:
    status, output = ended[f"{program} --help"]
    assert status == 0, output
    assert output.startswith("usage: ")
    assert "show this help message" in output


@pytest.mark.parametrize(("program", "words"), TINY.items())
def test_it_runs_at_a_tiny_size(program: str, words: str, ended: dict[str, tuple[int, str]]) -> None:
    status, output = ended[f"{program} {words}".strip()]
    assert status == 0, output
    assert output.strip()


@pytest.mark.parametrize("program", [name for name in PROGRAMS if STARTING.search(FILES[name])])
def test_what_it_has_started_ends_with_it_if_it_is_terminated(program: str) -> None:
    """Without a handler of SIGTERM, Python ends at once, and the programs that it has started go on for ever."""
    assert "signal.signal(signal.SIGTERM, signal.default_int_handler)" in FILES[program]


@pytest.mark.parametrize("file", [name for name, text in FILES.items() if SERVING.search(text)])
def test_a_router_that_it_starts_keeps_nothing_in_the_home_of_who_runs_it(file: str) -> None:
    assert STATELESS.search(FILES[file])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_page_says_what_it_is_for(program: str) -> None:
    module = program.removesuffix(".py").replace("/", ".")
    named = re.compile(rf"{re.escape(program)}\b|{re.escape(module)}\b")
    assert any(named.search(page.read_text()) for page in PAGES), "nobody runs it: name it on a page, or delete it"
