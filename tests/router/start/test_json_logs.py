"""With --json-logs every line of every process is a JSON object with its time, from the first word to the last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from policies.sla.parse import default_config
from router.start.commands.up import commands

ROOT = Path(__file__).parents[3]
FILE = """
tenants: {acme: {anonymous: true}}
pools: {far: {kind: vllm, at: ["http://127.0.0.1:9"], model: m}}
server: {http: "127.0.0.1:0", grpc: "off"}
"""


def begun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "router", *arguments, "--json-logs"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def checked(line: str) -> dict[str, object]:
    found = json.loads(line)
    assert {"time", "level", "logger"} <= found.keys()
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "arguments", [("serve", "none.yaml"), ("serve", "--to", "http://127.0.0.1:9"), ("shard", "--kv-listen", "7002")]
)
def test_a_failed_start_is_a_line_of_json_and_status_1(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    process = begun(tmp_path, *arguments)
    _, said = process.communicate(timeout=50)
    assert process.returncode == 1
    *_, last = map(checked, said.splitlines())
    assert last["level"] == "error"


def test_addresses_what_is_waited_for_and_the_end_are_lines_of_json(tmp_path: Path) -> None:
    (tmp_path / "sla.yaml").write_text(FILE)
    process = begun(tmp_path, "serve", "sla.yaml")
    assert process.stderr is not None
    lines = []
    with process.stderr as said:
        for line in said:
            lines.append(checked(line))
            if lines[-1].get("pool") == "far":
                process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    (listens,) = (line for line in lines if "http" in line)
    assert str(listens["http"]).startswith("http://127.0.0.1:")
    assert "draining ..." in {line.get("message") for line in lines}


def test_shards_that_up_starts_are_told(tmp_path: Path) -> None:
    config = default_config(local=2, model="bundled")
    for command in commands(config, tmp_path / "secret", json_logs=True):
        assert "--json-logs" in command.line("127.0.0.1:0")
    for command in commands(config, tmp_path / "secret"):
        assert "--json-logs" not in command.line("127.0.0.1:0")
