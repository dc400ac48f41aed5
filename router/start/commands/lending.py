"""Local shards of `pointsman up` lend KV to each other, on the loopback interface, with a secret made for the run."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.sla.pools import PoolSpec

_OWN = frozenset({"kv-listen", "kv-secret-file", "kv-ca"})
"""Options of a pool that says itself how its shards exchange KV."""

_APART = frozenset({"tensor-parallel", "window-kv"})
"""Options with which a shard may hold no whole block that it could lend."""


@contextmanager
def secret_of_a_run() -> Iterator[Path]:
    """A file with a random secret that only this user can read, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="pointsman-") as folder:
        file = Path(folder) / "secret"
        file.touch(0o600)
        file.write_text(secrets.token_hex(32))
        yield file


def lending_flags(pool: PoolSpec, secret: Path) -> tuple[str, ...]:
    """The flags by which the shards of `pool` lend to each other; none for one shard, or where the file says how."""
    if pool.local < 2 or pool.options.keys() & (_OWN | _APART):
        return ()
    return "--kv-listen", "127.0.0.1:0", "--kv-secret-file", str(secret)
