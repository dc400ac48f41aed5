"""The command line of `pointsman keys`; `router/start/commands/keys.py` does the work."""

from __future__ import annotations

from typing import Annotated

import typer

from router.start.arguments import USUAL_ADMIN, AdminAt, Ca, Cert, CertKey, admin_port

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, issue, rotate, limit and revoke API keys at a router's admin port.\n\nReads an admin key from "
    "POINTSMAN_ADMIN_KEY.\n\n\b\nExample:\n  pointsman keys issue acme --name ci",
)

KeyTenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id.")]
KeyLimits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="A limit by its name in FILE: requests_per_minute=60, budget_per_day='5 USD', budgets.trial='50 USD'.",
    ),
]


@app.command("list", short_help="The keys of TENANT.")
def list_keys(
    tenant: KeyTenant,
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the keys of TENANT, without the keys themselves, which are not stored.

    \b
    Example:
      pointsman keys list acme
    """
    from router.start.commands.keys import KeysDesk

    KeysDesk(admin_port(admin, ca, cert, key), tenant).list(as_json=json)


@app.command("issue", short_help="A new key, printed once.")
def issue_key(
    tenant: KeyTenant,
    name: Annotated[str | None, typer.Option(help="A name for people.")] = None,
    expires: Annotated[str | None, typer.Option(help="How long it is valid: 90d (default: for ever).")] = None,
    team: Annotated[str | None, typer.Option(help="A team of the tenant.")] = None,
    limit: KeyLimits = None,
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Print a new key of TENANT, alone on stdout. It is shown only now.

    \b
    Example:
      pointsman keys issue acme --name ci --expires 90d --limit budget_per_day="5 USD"
    """
    from router.start.commands.keys import KeysDesk

    KeysDesk(admin_port(admin, ca, cert, key), tenant).issue(name, expires, team, limit or ())


@app.command("rotate", short_help="A new key in place of another one.")
def rotate_key(
    tenant: KeyTenant,
    id: KeyId,  # noqa: A002 - it is the key's id
    overlap: Annotated[str | None, typer.Option(help="How long the old key stays valid (default: 24h).")] = None,
    expires: Annotated[
        str | None, typer.Option(help="How long the new key is valid (default: as the old one).")
    ] = None,
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Print a new key with the name, team and limits of the key ID, which stays valid for a while.

    \b
    Example:
      pointsman keys rotate acme key-2f6c0a9d1b7e --overlap 48h
    """
    from router.start.commands.keys import KeysDesk

    KeysDesk(admin_port(admin, ca, cert, key), tenant).rotate(id, overlap, expires)


@app.command("limits", short_help="Other limits for a key.")
def limit_key(
    tenant: KeyTenant,
    id: KeyId,  # noqa: A002
    limit: KeyLimits = None,
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Give the key ID these limits in place of those that it has; without --limit it has none of its own.

    \b
    Example:
      pointsman keys limits acme key-2f6c0a9d1b7e --limit requests_per_minute=60
    """
    from router.start.commands.keys import KeysDesk

    KeysDesk(admin_port(admin, ca, cert, key), tenant).limit(id, limit or ())


@app.command("revoke", short_help="Refuse a key from now on.")
def revoke_key(
    tenant: KeyTenant,
    id: KeyId,  # noqa: A002
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Refuse the key ID from now on; its running requests end normally.

    \b
    Example:
      pointsman keys revoke acme key-2f6c0a9d1b7e
    """
    from router.start.commands.keys import KeysDesk

    KeysDesk(admin_port(admin, ca, cert, key), tenant).revoke(id)
