"""Completion in real shells: commands with their descriptions, as they are written."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE_S = 40.0
READY = "ready-to-complete"

_LOADED = {
    "bash": ("bash --norc -i", 'eval "$(pointsman --show-completion bash)"'),
    "fish": ("fish --private", "pointsman --show-completion fish | source"),
    "zsh": ("zsh -f -i", 'autoload -Uz compinit; compinit -u -D; eval "$(pointsman --show-completion zsh)"'),
}
_CONTROLS = re.compile(r"\x1b[\[(][0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07|\x0f")


class Shell:
    """A shell in a terminal of its own, with the completion of `pointsman`."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._shown = terminal, ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, *texts: str) -> str:
        """What the terminal shows once it has all of `texts`."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(text in self._shown for text in texts):
            assert select.select([self._terminal], [], [], deadline - time.monotonic())[0], self._shown
            self._shown += _CONTROLS.sub("", os.read(self._terminal, 65536).decode(errors="replace"))
        return self._shown


@contextmanager
def a_shell(name: str, home: Path) -> Iterator[Shell]:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here: apt-get install {name}")
    started, loaded = _LOADED[name]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(home), "PATH": path, "TERM": "xterm"}
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(terminal, (60, 200))
    command = ["setsid", "--ctty", *started.split()]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment)
    os.close(inside)
    try:
        shell = Shell(terminal)
        # in halves, so that what is typed is not taken for what is answered
        shell.type(f"{loaded}; echo {READY[:5]}''{READY[5:]}\n")
        shell.wait_for(READY)
        yield shell
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("name", ["fish", "zsh"])
def test_commands_are_described_with_their_apostrophes(name: str, tmp_path: Path) -> None:
    with a_shell(name, tmp_path) as shell:
        shell.type("pointsman c\t\t")
        shell.wait_for("A chat with a router", "Change a running router's SLA file; roll it back.")


def test_zsh_describes_options_with_all_their_signs(tmp_path: Path) -> None:
    with a_shell("zsh", tmp_path) as shell:
        shell.type("pointsman check --\t")
        shell.wait_for("Values of ${env:NAME} and ${file:path} may be absent, as in CI; each is printed")


def test_bash_completes_commands_and_files(tmp_path: Path) -> None:
    (tmp_path / "sla-of-shop.yaml").write_text("")
    with a_shell("bash", tmp_path) as shell:
        shell.type("pointsman c\t\t")
        shell.wait_for("chat", "check", "config")
        shell.type(f"\x15pointsman check {tmp_path}/sla\t")
        shell.wait_for("sla-of-shop.yaml")
