"""The command line of `pointsman config`; `router/start/commands/config.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from router.start.arguments import USUAL_ADMIN, AdminAt, Ca, Cert, CertKey, SlaFile, admin_port

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Change the SLA file of a running router: drafts, comparison, rollback.\n\n"
    "A draft is checked and compared with the version in effect. Applied, it is written into the router's file, which "
    "stays the source of truth; the version before is kept. Reads an admin key from POINTSMAN_ADMIN_KEY."
    "\n\n\b\nExample:\n  pointsman config draft new.yaml",
)

ForRestart = Annotated[
    bool, typer.Option("--restart", help="Write it even if parts of it take effect at the next start only.")
]


def _commands(admin: str, ca: str | None, cert: str | None, key: str | None) -> Any:
    from router.start.commands.config import ConfigCommands

    return ConfigCommands(admin_port(admin, ca, cert, key))


@app.command("draft", short_help="Check a draft, and compare it with the file in effect.")
def config_draft(
    file: SlaFile, admin: AdminAt = USUAL_ADMIN, ca: Ca = None, cert: Cert = None, key: CertKey = None
) -> None:
    """Give FILE to the router as a draft: every mistake in it, or how it differs from the version in effect, what
    becomes of backends, and how the latest requests would have been decided. Exits with 1 for a mistake.

    \b
    Example:
      pointsman config draft new.yaml
    """
    report, lines = _commands(admin, ca, cert, key).draft(file)
    print(*lines, sep="\n")  # noqa: T201
    if report.problems:
        raise typer.Exit(1)
    print(f"apply it with: pointsman config apply {report.version}")  # noqa: T201


@app.command("apply", short_help="Put a draft or a file into effect.")
def config_apply(
    draft: Annotated[str, typer.Argument(metavar="VERSION|FILE", help="A draft's version, or a file.")],
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
    expected: Annotated[
        str | None,
        typer.Option("--if", metavar="VERSION", help="Only in place of this version (default: that of the draft)."),
    ] = None,
    restart: ForRestart = False,
) -> None:
    """Write a draft into the router's file and put it into effect. The version before is kept.

    Refused if the file has changed since the draft came.

    \b
    Examples:
      pointsman config apply 6cf845ae205b
      pointsman config apply new.yaml --if b73f7c03ca64
    """
    commands = _commands(admin, ca, cert, key)
    if Path(draft).is_file():
        report, lines = commands.draft(Path(draft))
        print(*lines, sep="\n")  # noqa: T201
        if report.problems:
            raise typer.Exit(1)
        draft = report.version
    print(commands.apply(draft, expected=expected, for_restart=restart))  # noqa: T201


@app.command("rollback", short_help="Put an earlier version back.")
def config_rollback(
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="One of `history` (default: the last).")
    ] = None,
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
    restart: ForRestart = False,
) -> None:
    """Write an earlier version into the router's file and put it into effect; again, and the newer one is back.

    \b
    Examples:
      pointsman config rollback
      pointsman config rollback 6cf845ae205b
    """
    print(_commands(admin, ca, cert, key).roll_back(version, for_restart=restart))  # noqa: T201


@app.command("history", short_help="Drafts, and earlier versions of the file.")
def config_history(admin: AdminAt = USUAL_ADMIN, ca: Ca = None, cert: Cert = None, key: CertKey = None) -> None:
    """List the drafts that the router has, and the earlier versions that are kept beside its file, the newest first.

    \b
    Example:
      pointsman config history
    """
    print(*_commands(admin, ca, cert, key).history(), sep="\n")  # noqa: T201


@app.command("show", short_help="The text of the router's file, a draft or an earlier version.")
def config_show(
    version: Annotated[str | None, typer.Argument(metavar="VERSION", help="Default: the file now.")] = None,
    admin: AdminAt = USUAL_ADMIN,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Print the text of the router's file, or of the draft or earlier version that is named.

    \b
    Example:
      pointsman config show > now.yaml
    """
    print(_commands(admin, ca, cert, key).show(version), end="")  # noqa: T201


@app.command("diff", short_help="How two files differ in meaning.")
def config_diff(
    before: Annotated[Path, typer.Argument(metavar="FILE", help="An SLA file.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="FILE2", help="Another one.", show_default=False)],
) -> None:
    """Print the differences of two SLA files, without comments, form and the order of keys. Needs no router.

    \b
    Example:
      pointsman config diff sla.yaml new.yaml
    """
    from router.start.commands.config import compared

    print(*compared(before, after), sep="\n")  # noqa: T201
