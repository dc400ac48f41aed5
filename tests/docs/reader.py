"""Follows a page in an empty directory: runs commands, writes files, compares outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import yaml

from policies.catalogue import builtin_catalogue
from policies.sla.parse import Parsed, examine, file_table
from tests.docs.blocks import HOW, ROOT, Block, Command, PageError, commands_of, shows
from tests.policies.sla.examples import outside_of

COMMAND_S = 60.0
START_S = 90.0
READY = "Pointsman serves "
"""What `pointsman up` and `serve` print when every pool has a backend."""

SECTIONS = set(file_table(builtin_catalogue()).keys)
_CURL_FOUND_NOBODY = 7
AT_HAND = ("examples", "helm")
"""Folders of the repository that a page's commands may name."""

CHECKOUT = "pointsman"
"""The folder in which a reader has a copy of the repository, to change it."""

PACKAGES = (
    "policies",
    "router",
    "backends",
    "shards",
    "http1",
    "tls",
    "simulation",
    "proto",
    "tests",
    "docs",
    "examples",
)

_PROGRAM = """#!/bin/sh
# the pointsman of this checkout; where it would listen at its usual ports, at free ones
command=$1; shift
case $command in
    up) set -- --http 127.0.0.1:$HTTP --grpc 127.0.0.1:$GRPC --admin 127.0.0.1:$ADMIN "$@" ;;
    top) set -- --admin 127.0.0.1:$ADMIN "$@" ;;
    serve) set -- --grpc 127.0.0.1:$GRPC "$@"
        grep -q '^ *http:' "$3" || set -- --http 127.0.0.1:$HTTP "$@" ;;
esac
exec {python} -c 'import sys; sys.argv[0] = "pointsman"; from router.start.cli import main; main()' "$command" "$@"
"""

_PYTHON = """#!/bin/sh
# a link would not find the packages of a virtual environment
exec {python} "$@"
"""

_PIP = """#!/bin/sh
# `pip install` into a directory of this reader's, with the build tools that are installed here
command=$1; shift
exec {python} -m pip "$command" --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \\
    --upgrade --target {site} "$@"
"""


@dataclass(frozen=True, slots=True)
class Ports:
    """Free ports for the usual ones, which pages name: 8080 for HTTP, 8081 for gRPC, 8082 for operators."""

    free: dict[str, str]

    @classmethod
    def choose(cls) -> Ports:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for listener in sockets:
                listener.bind(("127.0.0.1", 0))
            chosen = [str(listener.getsockname()[1]) for listener in sockets]
        return cls(dict(zip(("8080", "8081", "8082"), chosen, strict=True)))

    def inward(self, text: str) -> str:
        """`text` of a page with the ports that are used here."""
        return re.sub(
            r"((?:127\.0\.0\.1|0\.0\.0\.0|localhost):)(808[0-2])\b", lambda found: found[1] + self.free[found[2]], text
        )

    def outward(self, text: str) -> str:
        """Output with the ports that the page names."""
        for usual, free in self.free.items():
            text = text.replace(f":{free}", f":{usual}")
        return text

    def environment(self) -> dict[str, str]:
        return dict(zip(("HTTP", "GRPC", "ADMIN"), self.free.values(), strict=True))


@dataclass
class Desk:
    """A directory that is empty but for links to AT_HAND, a shell environment that lasts, and what goes on running.

    A context manager: what still runs is ended at the end, as by Ctrl-C.
    """

    home: Path
    ports: Ports = field(default_factory=Ports.choose)
    running: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Desk:
        self.directory.mkdir(parents=True)
        for name in AT_HAND:
            (self.directory / name).symlink_to(ROOT / name)
        programs = self.home / "bin"
        programs.mkdir()
        texts = {"pointsman": _PROGRAM, "pip": _PIP, "python": _PYTHON, "python3": _PYTHON}
        for name, text in texts.items():
            (programs / name).write_text(text.format(python=sys.executable, site=self.site))
            (programs / name).chmod(0o755)
        # a refusal ends curl with 22, so that a page's command cannot fail unnoticed
        (self.home / ".curlrc").write_text("fail-with-body\nsilent\n")
        return self

    def __exit__(self, *_: object) -> None:
        self.press_ctrl_c()

    @property
    def directory(self) -> Path:
        return self.home / "here"

    @property
    def site(self) -> Path:
        """The directory of installed distributions."""
        return self.home / "site"

    @cached_property
    def environment(self) -> dict[str, str]:
        """Of a fresh shell, as far as the machine lets it be."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("POINTSMAN", "OTEL", "PYTEST"))
        }
        path = os.pathsep.join([str(self.home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        plain = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "HOME": str(self.home), "CURL_HOME": str(self.home)}
        # the environment of pytest may name another checkout; the one that the reader changes comes first
        path_to_import = os.pathsep.join(map(str, [self.directory / CHECKOUT, ROOT, self.site]))
        return {**kept, **plain, "PATH": path, "PYTHONPATH": path_to_import}

    def script(self, command: str, *, is_kept: bool = True) -> list[str]:
        """`command` in a shell that begins where the last one ended, with what that one had exported and defined.

        Where this one ends is where the next begins, if `is_kept`.
        """
        state = self.home / "state"
        begin = f"set -eo pipefail; if [ -f {state} ]; then . {state}; fi"
        # ports are each command's own
        keep = f'unset HTTP GRPC ADMIN; {{ export -p; declare -f; printf "cd %q\\n" "$PWD"; }} > {state}'
        return ["bash", "-c", "\n".join([begin, *([f"trap '{keep}' EXIT"] if is_kept else ()), command])]

    def run(self, command: list[str], ports: Ports) -> tuple[int, str]:
        """Status and output, errors included, of `command`."""
        process = self._popen(command, ports, subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            complaint = f"it did not end within {COMMAND_S:.0f} s (if it is not to, write `<!-- run: stays -->`)"
            return process.returncode, f"{output.decode()}\n{complaint}"
        return process.returncode, ports.outward(output.decode())

    def _popen(self, command: list[str], ports: Ports, out: int | BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env={**self.environment, **ports.environment()},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # a group of its own, so that all of it can be ended
            start_new_session=True,
        )

    def start(self, command: str, *, until: str | None = None) -> str:
        """The output of `command` until it is ready, or has the words `until`; it goes on running, and the previous one
        is ended."""
        self.press_ctrl_c()
        log = self.home / "log"
        with log.open("wb") as out:
            self.running = self._popen(self.script(command, is_kept=False), self.ports, out)
        deadline = time.monotonic() + START_S
        # a router alone may reach its backends later, when a page brings them
        while (until or READY) not in log.read_text():
            if until is None and "serve" in command and self._is_healthy():
                break
            assert self.running.poll() is None, f"it ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"it never printed {until or READY!r}: {log.read_text()}"
            # another process only logs that it is ready
            time.sleep(0.05)
        return self.ports.outward(log.read_text())

    def _is_healthy(self) -> bool:
        # with a certificate of the page's own CA
        unchecked = ssl._create_unverified_context()
        for scheme in ("http", "https"):
            url = self.ports.inward("http://127.0.0.1:8080/healthz").replace("http", scheme, 1)
            try:
                with urllib.request.urlopen(url, timeout=2, context=unchecked) as reply:
                    return bool(reply.status == 200)
            except OSError:
                continue
        return False

    def press_ctrl_c(self) -> None:
        """End what runs, and wait for it."""
        process, self.running = self.running, None
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class SharedUp:
    """`pointsman up` without a file, started when the first page needs it and left to all of them."""

    command = "pointsman up"

    def __init__(self, home: Path) -> None:
        self._stack, self._home = ExitStack(), home

    def __enter__(self) -> SharedUp:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def ports(self) -> Ports:
        desk = self._stack.enter_context(Desk(self._home))
        desk.start(self.command)
        return desk.ports


class Reader:
    """Does what blocks say, in order. Every method raises AssertionError or PageError with the block's place."""

    def __init__(self, desk: Desk, up: SharedUp) -> None:
        self._desk, self._up, self._own_ports = desk, up, desk.ports
        self._parts: list[Block] = []

    def read(self, blocks: list[Block]) -> None:
        """Do what all of a page's blocks say."""
        for block in blocks:
            if block.mark.checked_by:
                continue
            if block.mark.not_run:
                self.look_at(block)
            else:
                self.follow(block)
        if self._parts:
            joined = "".join(block.text for block in self._parts)
            sound(joined, self._parts[0].where)

    def follow(self, block: Block) -> None:
        """Do what `block` says, and save it where it is a file."""
        text = block.text
        if block.mark.file:
            path = self._desk.directory / block.mark.file
            if block.mark.file.startswith(f"{CHECKOUT}/"):
                self._check_out(block)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._desk.ports.inward(text))
        match block.language:
            case "sh" | "console" if not block.mark.file:
                self._type(block)
            case "python" if not block.mark.file:
                self._run_python(block)
            case "yaml":
                self._load(block)
            case "json":
                json.loads(text)
            case "toml":
                tomllib.loads(text)
            case "diff":
                self._apply(block)

    def look_at(self, block: Block) -> None:
        """The check of a block that is not run: that it could be."""
        if block.language == "python":
            compile(block.text, block.where, "exec")
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language in ("sh", "console"):
            for command in commands_of(block):
                self._expect(block, command, ["bash", "-n", "-c", command.text], self._desk.ports)

    def _type(self, block: Block) -> None:
        *first, last = commands_of(block)
        for command in first:
            self._shell(block, command)
        if block.mark.stays and last.text.strip() == SharedUp.command:
            self._desk.ports = self._up.ports
        elif block.mark.stays:
            # the shared one goes on at its ports
            self._desk.ports = self._own_ports
            output = self._desk.start(self._desk.ports.inward(last.text))
            assert not last.shown or shows(last.shown, output), unlike(block, last, output)
        else:
            self._shell(block, last, exits=block.mark.exits)

    def _shell(self, block: Block, command: Command, exits: int = 0) -> None:
        ports = self._ports_of(block)
        self._expect(block, command, self._desk.script(ports.inward(command.text)), ports, exits)

    def _run_python(self, block: Block) -> None:
        ports = self._ports_of(block)
        line = [sys.executable, "-c", ports.inward(block.text)]
        self._expect(block, Command(block.text), line, ports, block.mark.exits)

    def _expect(self, block: Block, command: Command, line: list[str], ports: Ports, exits: int = 0) -> None:
        status, output = self._desk.run(line, ports)
        hint = " (does it need `<!-- run: with up -->`?)" if status == _CURL_FOUND_NOBODY else ""
        assert status == exits, f"{block.where}: ended with {status}, not {exits}{hint}:\n{command.text}\n{output}"
        assert not command.shown or shows(command.shown, output), unlike(block, command, output)

    def _apply(self, block: Block) -> None:
        """Change the reader's copy of the repository, which is where the shell is from now on."""
        checkout = self._check_out(block)
        for change in re.split(r"^(?=--- a/)", block.text, flags=re.MULTILINE)[1:]:
            command = ["git", "apply", "--recount", "-"]
            done = subprocess.run(command, cwd=checkout, input=change, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block.where}: the change cannot be applied:\n{done.stderr}"

    def _check_out(self, block: Block) -> Path:
        """The reader's copy of the repository, made when it is first needed; the shell goes there then."""
        checkout = self._desk.directory / CHECKOUT
        if not checkout.exists():
            copy_of_repository(checkout)
            self._shell(block, Command(f"cd {checkout}"))
        return checkout

    def _ports_of(self, block: Block) -> Ports:
        return self._up.ports if block.mark.with_up else self._desk.ports

    def _load(self, block: Block) -> None:
        if block.mark.with_plugins:
            self._shell(block, Command(f"pointsman check {block.mark.file}"))
            return
        keys = set(yaml.safe_load(block.text) or {})
        if not keys <= SECTIONS:
            raise PageError(
                f"{block.where}: this YAML is no SLA file ({', '.join(sorted(keys - SECTIONS))}): write before it "
                f"`<!-- checked by: tests/... -->` or `<!-- not run: why -->`; {HOW}"
            )
        if block.mark.is_part:
            self._parts.append(block)
            return
        parsed = sound(block.text, block.where)
        if block.mark.file:
            # a saved file must not have warnings from the start
            assert not parsed.doubts, f"{block.where}: {parsed.doubts}"


def copy_of_repository(to: Path) -> None:
    """Copy the packages, the tests, the pages and the settings of the tools to the new folder `to`.

    Compiled code is copied too. It is valid there, as a copy keeps the time of its source, and so a page's commands do
    not compile hundreds of modules.
    """
    to.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, to / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)


def sound(text: str, where: str) -> Parsed:
    """The parsed SLA file `text`. Raises AssertionError with its mistakes."""
    try:
        return examine(text, source=where, outside=outside_of(text))
    except Exception as error:
        raise AssertionError(f"{where}: {error} (is it one of several parts? write `<!-- run: part -->`)") from error


def unlike(block: Block, command: Command, output: str) -> str:
    """The message if the page shows another output."""
    return f"{block.where}: shown\n\n{command.shown}\n\nbut it says\n\n{output}\n\nfor\n\n{command.text}"


def can_read() -> bool:
    """Is there a shell and a curl?"""
    return all(shutil.which(name) for name in ("bash", "curl"))
