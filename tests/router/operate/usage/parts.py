"""Databases, rows and accounts for the tests of usage."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from policies.nouns import Usage
from router.call.observer import Account, Spent
from router.operate.usage.rows import AMOUNTS, HOUR_S, Rows, UsageKey

NOON = 1_795_521_600
"""24 November 2026, 12:00 UTC."""


def a_key(**fields: object) -> UsageKey:
    usual = {"hour": NOON, "tenant": "acme", "team": "", "key": "", "user": "", "model": "m", "service_class": "chat"}
    return UsageKey(**{**usual, "pool": "own", "kind": "vllm", "currency": "USD", **fields})  # type: ignore[arg-type]


def some_rows(count: int = 1, **fields: object) -> Rows:
    """Rows of `count` hours, each with one request, 100 prompt tokens (40 cached), 10 of the answer, and a cost."""
    usual = {"finished": 1, "prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 10, "cost": 123_456_789}
    return {
        a_key(hour=NOON + hour * HOUR_S, **fields): [usual.get(name, 0) for name in AMOUNTS] for hour in range(count)
    }


def an_account(*spent: Spent, user: str | None = None, started_at: float = 0.0) -> Account:
    account = Account("r", started_at, {}, None, lambda *_: None)
    account.tenant, account.service_class, account.model, account.user = "acme", "chat", "m", user
    account.spent = spent
    return account


SPENT = Spent("m", "own", Usage(100, 10, 40), 123_456_789)


def _program(name: str) -> str | None:
    """Debian keeps PostgreSQL's programs out of the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


HAS_POSTGRES = _program("initdb") is not None


class PostgresServer:
    """A postgres process on a unix socket. Not as root, which PostgreSQL refuses."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._user = folder, "nobody" if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._call("initdb", "-D", str(folder / "data"), "-U", "pointsman", "-A", "trust", "--no-sync")

    @property
    def url(self) -> str:
        return f"postgresql://pointsman@/postgres?host={self._folder}"

    def start(self) -> None:
        if self._process is not None:
            return
        command = [_program("postgres") or "", "-D", str(self._folder / "data"), "-k", str(self._folder)]
        self._process = subprocess.Popen([*command, "-c", "listen_addresses=", "-F"], **self._quietly())
        deadline = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, "postgres does not start"
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            # "immediate": as a crash, but it takes its own children along
            self._process.send_signal(3)
            self._process.wait()
            self._process = None

    @property
    def socket(self) -> Path:
        return self._folder / ".s.PGSQL.5432"

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It is stopped (SIGSTOP) with the processes of its connections, which stay: no call is answered."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        processes = [self._process.pid, *map(int, children)]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)

    def demote(self) -> None:
        """Take no more writes, as a primary does that became a standby."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SHOW default_transaction_read_only").fetchone() != ("on",):
                time.sleep(0.01)

    def clean(self) -> None:
        self.start()
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")

    def _call(self, program: str, *arguments: str) -> None:
        subprocess.run([_program(program) or "", *arguments], check=True, **self._quietly())  # type: ignore[call-overload]

    def _quietly(self) -> dict[str, object]:
        return {"user": self._user, "cwd": self._folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@contextmanager
def a_postgres() -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
