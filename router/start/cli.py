"""The command `pointsman`. Each command imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from policies.errors import ExpectedError

if TYPE_CHECKING:
    from router.start.config_file import Contents

app = typer.Typer(
    name="pointsman",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM router and gateway: tenants, priority and prompt length decide, and every prompt goes to where its "
    "prefix already lives.\n\nStart with `pointsman up`: a router, two shards and a small model on this machine.",
)

SlaFile = Annotated[Path, typer.Argument(metavar="FILE", help="The SLA file (YAML).", show_default=False)]
Shadow = Annotated[
    Path | None,
    typer.Option(metavar="FILE2", help="A second file that decides too, without effect; differences are counted."),
]
JsonLogs = Annotated[bool, typer.Option("--json-logs", help="Log one JSON object a line, for machines.")]
Decisions = Annotated[
    str | None, typer.Option(metavar="FILE", help="Log decisions and outcomes there, as JSON lines; - is stdout.")
]


def _door(what: str) -> Any:
    return typer.Option(metavar="HOST:PORT", help=f"Where {what}; the file's word otherwise.")


Http = Annotated[str | None, _door("HTTP is served")]
Grpc = Annotated[str | None, _door("gRPC is served, or off")]
Admin = Annotated[str | None, _door("operators and the dashboard are served, or off")]
Picker = Annotated[str | None, _door("gateways ask which endpoint to take")]


def show_version(asked: bool) -> None:
    """Print the version and exit, if `asked`."""
    from importlib.metadata import version

    if asked:
        print(f"pointsman {version('pointsman')}")  # noqa: T201
        raise typer.Exit


@app.callback()
def pointsman(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take what stands before a command."""


@app.command(short_help="Router, shards and a model on this machine.")
def up(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The SLA file; without one: defaults.")] = None,
    http: Http = None,
    grpc: Grpc = None,
    admin: Admin = None,
    shards: Annotated[int | None, typer.Option(help="Local shards, if there is no file.", min=1)] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="A checkpoint in Hugging Face format, if there is no file.")
    ] = None,
    shadow: Shadow = None,
    decisions: Decisions = None,
    json_logs: JsonLogs = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each decision.")] = False,
) -> None:
    """Run router and shards together on this machine, until Ctrl-C.

    \b
    Examples:
      pointsman up
      pointsman up sla.yaml
      pointsman up --model ./Qwen3-0.6B --shards 1
    """
    from policies.sla.config import BUNDLED
    from policies.sla.parse import default_config
    from router.operate.telemetry.logs import LogOptions
    from router.start.commands.overrides import listening, logging_decisions
    from router.start.commands.up import Files, run

    if file is not None and (shards or model):
        raise typer.BadParameter("--shards and --model are for use without a file; write `local:` and `model:` into it")
    if file is None:
        files = Files(shadow=started_with(shadow) if shadow else None)
        config = default_config(local=shards or 2, model=model or BUNDLED)
    else:
        files = Files(contents := started_with(file), started_with(shadow) if shadow else None)
        config = contents.config
    config = listening(config, http, grpc, admin, usual_admin=True)
    run(logging_decisions(config, decisions), files, local=True, log=LogOptions(json_logs, verbose))


@app.command(short_help="The router alone, in front of FILE's backends.")
def serve(
    file: SlaFile,
    http: Http = None,
    grpc: Grpc = None,
    admin: Admin = None,
    shadow: Shadow = None,
    processes: Annotated[
        int, typer.Option(help="Routers on the same ports, sharing what FILE's store says.", min=1)
    ] = 1,
    process: Annotated[str | None, typer.Option(hidden=True)] = None,
    picker: Picker = None,
    decisions: Decisions = None,
    json_logs: JsonLogs = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each decision.")] = False,
) -> None:
    """Run the router alone, in front of the backends that FILE names, until Ctrl-C or SIGTERM.

    A FILE that changes takes effect whole within two seconds, or is refused and the old one stays.

    \b
    Examples:
      pointsman serve sla.yaml
      pointsman serve sla.yaml --shadow next.yaml
    """
    from router.operate.telemetry.logs import LogOptions
    from router.start.commands.overrides import listening, logging_decisions
    from router.start.commands.up import Files, run, run_many

    contents = started_with(file)
    config = logging_decisions(listening(contents.config, http, grpc, admin, picker), decisions)
    local = [pool.name for pool in config.pools.values() if pool.local]
    if local:
        fail(
            f"pool {local[0]!r} has `local:` shards, which `serve` does not start",
            "use `pointsman up`, or `at:` addresses",
        )
    if processes > 1 and process is None:
        if not run_many(config, processes, sys.argv[1:]):
            raise typer.Exit(1)
        return
    files = Files(contents, started_with(shadow) if shadow else None)
    run(config, files, local=False, log=LogOptions(json_logs, verbose), process=process)


@app.command(
    short_help="One shard of our own engine.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[OPTIONS]",
)
def shard(context: typer.Context) -> None:
    """Run one shard of our own engine; `pointsman shard --help` lists its options."""
    from router.start.commands.local_shards import shard_environment
    from router.start.preflight import require_engine

    require_engine()
    os.execve(sys.executable, [sys.executable, "-m", "shards", *context.args], shard_environment(os.environ))  # noqa: S606


@app.command(short_help="Every mistake in FILE, with its line.")
def check(file: SlaFile) -> None:
    """Find every mistake in FILE: prints line, path and what was probably meant. Exits with 1 if there is any.

    Proves that every request matches a rule and that every rule is reached. What is legal but hardly meant is a
    warning, and FILE is sound all the same.

    \b
    Example:
      pointsman check sla.yaml
    """
    from router.fleet.feeds.options import unheard

    config = started_with(file).config
    for doubt in unheard(config.pools.values()):
        print(f"warning: {doubt}", file=sys.stderr)  # noqa: T201
    counts = (
        _counted(config.classes, "class", "classes"),
        _counted(config.rules, "rule", "rules"),
        _counted(config.pools, "pool", "pools"),
    )
    print(f"{file} is sound: {', '.join(counts)}.")  # noqa: T201
    print(f"  classes by rank: {', '.join(config.classes)}")  # noqa: T201
    print(f"  tenants: {', '.join(config.tenants)}\n  version: {config.version}")  # noqa: T201


def _counted(things: Sized, one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"


@app.command(short_help="The JSON Schema of FILE, for editors.")
def schema() -> None:
    """Print the JSON Schema of the SLA file, for editors that complete, explain and check while you write.

    \b
    Example:
      pointsman schema > sla.schema.json
    and the first line of the SLA file beside it:
      # yaml-language-server: $schema=sla.schema.json
    """
    from json import dumps

    from policies.sla.parse import json_schema
    from router.start.plugins import installed_catalogue

    print(dumps(json_schema(installed_catalogue()), indent=2))  # noqa: T201


@app.command(short_help="What FILE would do with a request, and why.")
def explain(
    file: SlaFile,
    tokens: Annotated[str, typer.Option(help="Length of the prompt: 900, 16k.", show_default=False)],
    tenant: Annotated[str | None, typer.Option(help="Who asks; without it whoever needs no key.")] = None,
    model: Annotated[str | None, typer.Option(help="The model; without it the first that the file knows.")] = None,
    priority: Annotated[str | None, typer.Option(help="The class that the caller asks for.")] = None,
    max_output: Annotated[str, typer.Option(help="The longest answer, in tokens.")] = "512",
    session: Annotated[str | None, typer.Option(help="The caller's session.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; may be repeated.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An entry of the request's metadata; so may this.")
    ] = None,
    cached: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND=TOKENS", help="Tokens of the prompt that a backend holds.")
    ] = None,
    load: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND=REQUESTS", help="Requests that run at a backend.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The whole record as JSON.")] = False,
) -> None:
    """Say what FILE would do with a request, and why: rule, class with targets and what follows on a miss, pools,
    policy, drops, scores. Starts nothing.

    Backends are taken to be well, idle, empty and to serve the model, unless told otherwise.

    \b
    Example:
      pointsman explain sla.yaml --tenant acme --tokens 90k --cached own-0=60k --load own-0=8
    """
    from policies.quantities import read_tokens
    from router.operate.what_if import WhatIf, explain_on_paper
    from router.protocols.explanations import as_json, as_text
    from router.start.commands.overrides import read_pair

    config = opened(file).config
    try:
        described = WhatIf(
            tenant=tenant,
            model=model,
            prompt_tokens=read_tokens(tokens),
            max_new_tokens=read_tokens(max_output),
            priority=priority,
            session=session,
            headers={name.lower(): value for name, value in map(read_pair, header or ())},
            metadata=dict(map(read_pair, metadata or ())),
            held_tokens={name: read_tokens(value) for name, value in map(read_pair, cached or ())},
            running={name: read_tokens(value) for name, value in map(read_pair, load or ())},
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    told = explain_on_paper(described, config)
    print(as_json(told).decode() if json else as_text(told))  # noqa: T201


@app.command(short_help="What a day of requests would see under FILE.")
def simulate(
    file: SlaFile,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests to come: JSON lines in Mooncake's format, see docs/capacity.md."),
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests to come again: a decision log of `serve`.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE2", help="A second SLA file for the same requests, side by side.")
    ] = None,
    find_backends: Annotated[
        str | None, typer.Option(metavar="POOL", help="Find the fewest backends of POOL that keep every target.")
    ] = None,
    backends: Annotated[
        list[str] | None, typer.Option(metavar="POOL=N,...", help="Backends of a pool; the file's number otherwise.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Speed and KV of each pool (YAML); an 8B model on one H200 without it."),
    ] = None,
    speed: Annotated[float, typer.Option(help="Requests come so many times as fast: 2 doubles the load.")] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Only the first so many lines.", min=1)] = None,
    tenant: Annotated[str | None, typer.Option(help="Who asks, where a line does not say so.")] = None,
    model: Annotated[str | None, typer.Option(help="The model, where a line does not say so.")] = None,
    seed: Annotated[int, typer.Option(help="Of every draw; the same seed gives the same result.")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write the results there as JSON; - is stdout.")
    ] = None,
) -> None:
    """Say what FILE would make of a day of requests: TTFT of each class against its target, who is refused, who pays,
    how busy each backend is. Starts nothing.

    The router's own pipeline and the shards' own scheduler run on a virtual clock; only the models' work is simulated.

    \b
    Examples:
      pointsman simulate sla.yaml --trace day.jsonl
      pointsman simulate sla.yaml --trace day.jsonl --speed 2 --backends own=8
      pointsman simulate sla.yaml --decisions decisions.jsonl --against changed.yaml
      pointsman simulate sla.yaml --trace day.jsonl --find-backends own
    """
    from router.start.commands.overrides import read_counts
    from simulation.command import Wanted, run

    if not speed > 0:
        raise typer.BadParameter("--speed must be above 0")
    if find_backends is not None and against is not None:
        raise typer.BadParameter("--find-backends is for one file; leave --against out")
    try:
        counts = read_counts(backends or ())
    except ValueError as error:
        raise typer.BadParameter(f"--backends: {error}") from error
    run(
        Wanted(
            file=(str(file), started_with(file).config),
            against=(str(against), started_with(against).config) if against else None,
            trace=trace,
            decisions=decisions,
            profile=profile,
            counts=counts,
            speed=speed,
            most=requests,
            tenant=tenant,
            model=model,
            seed=seed,
            find=find_backends,
            json=json,
        )
    )


@app.command(short_help="The dashboard in a terminal.")
def top(
    admin: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the router serves operators; or a URL.")
    ] = "127.0.0.1:8082",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Show classes against their targets, tenants, backends and decisions as they come, until Ctrl-C.

    An admin key is read from POINTSMAN_ADMIN_KEY. The same as a page: http://127.0.0.1:8082/dashboard

    \b
    Examples:
      pointsman top
      pointsman top --admin 10.0.0.7:8082
    """
    from router.operate.dashboard.top import run

    run(admin, once=once)


def started_with(file: Path) -> Contents:
    """What `file` says, as `opened` gives it; prints what in it is hardly meant as warnings."""
    contents = opened(file)
    for doubt in contents.doubts:
        print(f"warning: {doubt}", file=sys.stderr)  # noqa: T201
    return contents


def opened(file: Path) -> Contents:
    """What `file` says; prints every mistake and exits with 1 if there is one."""
    from router.start.config_file import ConfigFile
    from router.start.plugins import installed_catalogue

    try:
        return ConfigFile(file, os.environ, installed_catalogue()).read()
    except ExpectedError as error:
        fail(str(error))


def fail(message: str, hint: str = "") -> NoReturn:
    """Print `message` for a person and exit with 1."""
    print(f"{message}\n  {hint}" if hint else message, file=sys.stderr)  # noqa: T201
    raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ExpectedError as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(1)
