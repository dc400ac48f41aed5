"""The units of examples/systemd/ start commands that exist, and systemd reads them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from router.start.cli import app as router_app
from shards.__main__ import app as shard_app

UNITS = sorted((Path(__file__).parents[2] / "examples/systemd").iterdir())
COMMANDS: dict[str, Any] = {
    **vars(typer.main.get_command(router_app))["commands"],
    "shard": typer.main.get_command(shard_app),
}


def lines(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.+)$", unit.read_text(), re.MULTILINE)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_command_of_ours_is_understood(unit: Path) -> None:
    commands = [*lines(unit, "ExecStartPre"), *lines(unit, "ExecStart")]
    assert commands
    for command in commands:
        program, name, *words = shlex.split(command.replace("%i", "7001"))
        assert program == "/opt/pointsman/bin/pointsman"
        COMMANDS[name].make_context(name, words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_stop_leaves_running_requests_their_time(unit: Path) -> None:
    # the router's drain is 30 s, a shard's grace 10 s
    assert int(lines(unit, "TimeoutStopSec")[0]) > (30 if "router" in unit.name else 10)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_reads_the_unit(unit: Path, tmp_path: Path) -> None:
    # our program is not installed where the unit has it
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/pointsman/bin/pointsman", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
