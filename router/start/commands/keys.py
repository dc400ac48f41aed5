"""`pointsman keys`: API keys of tenants, listed and changed at a router's admin port."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from rich import box
from rich.table import Table

from policies.errors import InvalidRequest
from router.operate.admin_port import AdminPort
from router.start.commands.overrides import read_pair
from router.terminal import inert_console


class KeysDesk:
    """The keys of one `tenant` at an admin `port`. Each method prints what it did. Raises ExpectedError."""

    def __init__(self, port: AdminPort, tenant: str) -> None:
        self._port, self._tenant = port, tenant
        self._path = f"/admin/tenants/{quote(tenant, safe='')}/keys"

    def __repr__(self) -> str:
        return f"<KeysDesk of {self._tenant} at {self._port}>"

    def list(self, *, as_json: bool) -> None:
        """All keys, oldest first; those of the file last."""
        keys = self._call("GET", self._path)["keys"]
        if as_json:
            print(json.dumps(keys, indent=2))  # noqa: T201
            return
        if not keys:
            print(f"{self._tenant} has no keys.")  # noqa: T201
            return
        inert_console(width=None if sys.stdout.isatty() else 200).print(_table(keys))

    def issue(self, name: str | None, expires: str | None, team: str | None, limits: Sequence[str]) -> None:
        """Print a new key, alone on stdout."""
        wanted = {"name": name, "expires": expires, "team": team, "limits": limits_of(limits) or None}
        body = {field: value for field, value in wanted.items() if value is not None}
        self._show_new(self._call("POST", self._path, body))

    def rotate(self, id: str, overlap: str | None, expires: str | None) -> None:  # noqa: A002 - it is the key's id
        """Print a new key in place of the key `id`."""
        body = {field: value for field, value in (("overlap", overlap), ("expires", expires)) if value is not None}
        self._show_new(self._call("POST", f"{self._of(id)}/rotate", body))

    def limit(self, id: str, limits: Sequence[str]) -> None:  # noqa: A002
        """Give the key `id` these limits in place of those that it has."""
        changed = self._call("PATCH", self._of(id), {"limits": limits_of(limits)})
        print(f"key {changed['id']} of {self._tenant}: {_shown_limits(changed['limits'])}")  # noqa: T201

    def revoke(self, id: str) -> None:  # noqa: A002
        """Revoke the key `id`."""
        gone = self._call("DELETE", self._of(id))
        print(f"key {gone['id']} of {self._tenant} is revoked")  # noqa: T201

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        sent = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        answer = self._port.call(path, method, body=sent, headers=headers)
        try:
            found: dict[str, Any] = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._port.no_reply(error) from error
        return found

    def _of(self, id: str) -> str:  # noqa: A002
        return f"{self._path}/{quote(id, safe='')}"

    def _show_new(self, made: dict[str, Any]) -> None:
        print(made["key"])  # noqa: T201
        about = f"key {made['id']} of {self._tenant}, shown only now; {_shown_limits(made['limits'])}"
        print(about, file=sys.stderr)  # noqa: T201


def limits_of(pairs: Iterable[str]) -> dict[str, Any]:
    """The limits in texts such as `requests_per_minute=60` and `budgets.launch=500 USD`. Raises InvalidRequest."""
    found: dict[str, Any] = {}
    for pair in pairs:
        try:
            name, value = read_pair(pair)
        except ValueError as error:
            raise InvalidRequest(f"--limit {error}", hint="write --limit requests_per_minute=60") from error
        if name.startswith("budgets."):
            found.setdefault("budgets", {})[name.removeprefix("budgets.")] = {"cost": value}
        else:
            found[name] = value
    return found


def _table(keys: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("id", "name", "team", "created", "expires", "last used", "limits"):
        table.add_column(name, no_wrap=name != "limits")
    for key in keys:
        state = "expired" if key.get("expired") else _day(key.get("expires"), "never")
        replaced = f" (rotated to {key['replaced_by']})" if key.get("replaced_by") else ""
        is_issued = key["from"] == "api"
        table.add_row(
            key["id"],
            key.get("name") or "-",
            key.get("team") or "-",
            _day(key.get("created"), "in the file"),
            f"{state}{replaced}" if is_issued else "-",
            _day(key.get("last_used"), "-"),
            _shown_limits(key["limits"]),
        )
    return table


def _day(at: float | None, without: str) -> str:
    return without if at is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


def _shown_limits(limits: dict[str, Any]) -> str:
    parts = [f"{name} {value}" for name, value in limits.items() if name != "budgets"]
    parts += [f"budget {name} {budget['cost']}" for name, budget in limits.get("budgets", {}).items()]
    return ", ".join(parts) or "no limits of its own"
