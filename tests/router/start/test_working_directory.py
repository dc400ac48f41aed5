"""Programs of ours that others of ours start import nothing from the folder in which the operator works."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shards.parallel.job import PartJob
from shards.parallel.processes import _start
from tests.engines.programs import free_ports

SCRIPT = str(Path(sys.executable).with_name("pointsman"))
OURS = ("router", "shards", "policies", "backends", "http1", "tls", "simulation", "numpy", "torch", "typer")

SERVER = 'server: {{http: "127.0.0.1:{http}", grpc: "127.0.0.1:{grpc}", admin: "127.0.0.1:{admin}"}}\n'
FILES = {
    "up": "pools: {own: {kind: shard, local: 1, model: bundled}}\n",
    "serve": "pools: {own: {kind: openai_compatible, at: [http://127.0.0.1:1]}}\n",
}


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file for each module that a program of ours may import; each leaves a trace."""
    for name in {*sys.stdlib_module_names, *OURS}:
        trace = tmp_path / "traces" / name
        (tmp_path / f"{name}.py").write_text(
            f"open({str(trace)!r}, 'w').close()\nraise SystemExit('trapped: {name}')\n"
        )
    (tmp_path / "traces").mkdir()
    monkeypatch.chdir(tmp_path)
    # a sitecustomize of the developer must not make this pass
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path / "traces"


def traces(trap: Path) -> list[str]:
    return sorted(path.name for path in trap.iterdir())


def test_the_trap_works(trap: Path) -> None:
    subprocess.run([sys.executable, "-m", "router", "--version"], check=False, capture_output=True)
    assert traces(trap) != []


@pytest.mark.parametrize("words", [("shard", "--help"), ("quantize", "--help")])
def test_a_command_that_becomes_another_program_runs_no_file_of_the_working_directory(
    trap: Path, words: tuple[str, ...]
) -> None:
    done = subprocess.run([SCRIPT, *words], check=False, capture_output=True, text=True)
    assert (done.returncode, traces(trap)) == (0, []), done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [("up",), ("serve", "--processes", "2")])
def test_a_router_that_starts_other_processes_runs_no_file_of_the_working_directory(
    trap: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    http, grpc, admin = free_ports(3)
    file, said = tmp_path / "sla.yaml", tmp_path / "said"
    file.write_text(FILES[words[0]] + SERVER.format(http=http, grpc=grpc, admin=admin))
    with said.open("w") as output:
        process = subprocess.Popen([SCRIPT, words[0], str(file), *words[1:]], stdout=output, stderr=output)
        try:
            while process.poll() is None and not traces(trap) and not is_ready(http):
                time.sleep(0.1)
            assert (process.poll(), traces(trap)) == (None, []), said.read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def is_ready(port: int) -> bool:
    """Whether the router at `port` answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            return b" 200 " in connection.recv(100)
    except OSError:
        return False


def test_a_part_of_a_divided_model_runs_no_file_of_the_working_directory(trap: Path) -> None:
    own, theirs = socket.socketpair()
    job = PartJob("nowhere", "auto", "auto", "cpu", 1, 1, 2, 9, theirs.fileno(), True)
    with own, theirs:
        process = _start(job, dict(os.environ))
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert traces(trap) == []
