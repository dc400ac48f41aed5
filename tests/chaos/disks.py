"""Disks of a few megabytes, which several programs see and which can be full. Needs root."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.engines.programs import NotStarted, Program

MEGABYTES = {"usage": 16, "audit": 8, "batches": 32}
"""Names of the disks, and their sizes."""


class Disks(Program):
    """A program with file systems in memory that are mounted in its own namespace, below the folder `ready_at`."""

    @classmethod
    def mounted_at(cls, folder: Path) -> Disks:
        """Those of MEGABYTES below `folder`, once it is started."""
        folder.mkdir()
        steps = []
        for name, size in MEGABYTES.items():
            (folder / name).mkdir()
            steps.append(f"mount -t tmpfs -o size={size}m none {folder / name}")
        script = " && ".join([*steps, f"touch {folder / 'ready'}", "exec sleep infinity"])
        command = (_path("unshare"), "--mount", "sh", "-c", script)
        return cls("disks", command, folder.parent, str(folder))

    @property
    def place(self) -> Path:
        """Where the disks are, for a program that sees them."""
        return Path(self.ready_at)

    def outside(self, name: str) -> Path:
        """Where disk `name` is, for a program that does not see it."""
        return Path(f"/proc/{self.pid}/root{self.place / name}")

    def wait_until_ready(self, timeout_s: float = 10.0) -> None:
        """Wait until all are mounted."""
        until = time.monotonic() + timeout_s
        while not (self.place / "ready").exists():
            if time.monotonic() > until:
                raise NotStarted(f"{self.name} was not ready:\n{self.log_tail()}")
            time.sleep(0.02)

    def seeing(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """The command of a program that sees them."""
        return (_path("nsenter"), f"--mount=/proc/{self.pid}/ns/mnt", *command)

    @contextmanager
    def full(self, name: str) -> Iterator[None]:
        """Disk `name` has no room until the context is left."""
        filler = self.outside(name) / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        try:
            yield
        finally:
            filler.unlink()


def _path(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found
