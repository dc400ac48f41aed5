"""The command `pointsman`. Each command imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from policies.errors import ExpectedError
from router.inert import inert, inert_output
from router.start.arguments import USUAL_ADMIN, USUAL_AT, AdminAt, At, Ca, Cert, CertKey, SlaFile, admin_port
from router.start.commands.batch import app as batch_app
from router.start.commands.config_app import app as config_app
from router.start.commands.keys_app import app as keys_app
from router.start.completion import whole_descriptions
from router.start.threads import give_stacks
from shards.logs import tell
from tls.settings import TlsSettings

if TYPE_CHECKING:
    from policies.sla.config import Config
    from router.start.config_file import Contents

app = typer.Typer(
    name="pointsman",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM router and gateway. One YAML file sets each tenant's priority and latency target. Prompts go to the "
    "backends that have them cached.\n\nStart with `pointsman up`: a router, two shards and a small model, all local.",
)

app.add_typer(batch_app, name="batch", short_help="Batches of requests: submit, list, cancel, results.")
app.add_typer(keys_app, name="keys", short_help="API keys of tenants: list, issue, rotate, limit, revoke.")
app.add_typer(config_app, name="config", short_help="Change a running router's SLA file; roll it back.")

Shadow = Annotated[
    Path | None,
    typer.Option(metavar="FILE2", help="A second file that also decides, without effect; differences are counted."),
]
AccessLogs = Annotated[
    bool, typer.Option("--access-log", help="Log each HTTP request: client, path, status, time, tenant, backend.")
]
JsonLogs = Annotated[bool, typer.Option("--json-logs", help="Log one JSON object per line.")]
Decisions = Annotated[
    str | None, typer.Option(metavar="FILE", help="Log of decisions and outcomes, as JSON lines; - is stdout.")
]


def _address(what: str) -> Any:
    return typer.Option(metavar="HOST:PORT", help=f"{what} (default: from FILE).")


Http = Annotated[str | None, _address("HTTP address")]
Grpc = Annotated[str | None, _address("gRPC address, or off")]
Admin = Annotated[str | None, _address("Address for operators and the dashboard, or off")]
Picker = Annotated[str | None, _address("Address where gateways ask for an endpoint")]
MetricsAt = Annotated[str | None, _address("Address that serves /metrics without a key, or open: the HTTP address")]


def show_version(asked: bool) -> None:
    """Print the version and the commit, and exit, if `asked`."""
    from router.version import version_text

    if asked:
        print(f"pointsman {version_text()}")  # noqa: T201
        raise typer.Exit


@app.callback()
def pointsman(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show version and commit, and exit.")
    ] = False,
) -> None:
    """Handle options before a command."""


@app.command(short_help="Router, shards and a model on this machine.")
def up(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The SLA file (default: built-in).")] = None,
    http: Http = None,
    grpc: Grpc = None,
    admin: Admin = None,
    shards: Annotated[int | None, typer.Option(help="Number of local shards without a FILE.", min=1)] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="A checkpoint in Hugging Face format, without a FILE.")
    ] = None,
    shadow: Shadow = None,
    decisions: Decisions = None,
    json_logs: JsonLogs = False,
    access_log: AccessLogs = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each decision.")] = False,
) -> None:
    """Run router and shards together on this machine, until Ctrl-C.

    \b
    Examples:
      pointsman up
      pointsman up sla.yaml
      pointsman up --model ./Qwen3-0.6B --shards 1
    """
    from policies.sla.parse import default_config
    from policies.sla.pools import BUNDLED
    from router.operate.telemetry.logs import LogOptions, log_to
    from router.start.commands.overrides import listening, logging_decisions
    from router.start.commands.up import Files, run
    from router.start.state import name_for
    from router.terminal import inert_console

    if file is not None and (shards or model):
        raise typer.BadParameter("--shards and --model need a start without FILE; write `local:` and `model:` into it")
    notices = log_to(inert_console(stderr=True), LogOptions(json_logs, verbose, access_log))
    if file is None:
        files = Files(shadow=started_with(shadow) if shadow else None)
        config = default_config(local=shards or 2, model=model or BUNDLED)
        config = kept_for(config, "up" if model is None else name_for("up", str(Path(model).absolute())))
    else:
        files = Files(contents := kept(started_with(file)), started_with(shadow) if shadow else None)
        config = contents.config
    config = listening(config, http, grpc, admin, usual_admin=True)
    run(logging_decisions(config, decisions), files, notices, local=True)


@app.command(short_help="The router alone, in front of FILE's backends or of --to URL.")
def serve(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The SLA file (YAML).")] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="An engine that already runs, in place of FILE; may be repeated."),
    ] = None,
    http: Http = None,
    grpc: Grpc = None,
    admin: Admin = None,
    shadow: Shadow = None,
    processes: Annotated[
        str,
        typer.Option(
            metavar="COUNT",
            help="Number of routers on the same ports, or auto: one for each core. They share all state, by FILE's "
            "store or a Redis of this machine.",
        ),
    ] = "1",
    process: Annotated[str | None, typer.Option(hidden=True)] = None,
    process_store: Annotated[str | None, typer.Option(hidden=True)] = None,
    picker: Picker = None,
    metrics: MetricsAt = None,
    ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="CAs of engines at https:// URLs of --to; default: the system's.")
    ] = None,
    decisions: Decisions = None,
    json_logs: JsonLogs = False,
    access_log: AccessLogs = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each decision.")] = False,
) -> None:
    """Run the router alone, in front of the backends that FILE names, until Ctrl-C or SIGTERM.

    A change of FILE takes effect whole within two seconds. An invalid FILE is rejected, and the old one stays.

    Without FILE, --to names engines that already run. Their endpoints are asked which kind each is (vLLM, SGLang,
    Ollama, llama.cpp, TGI and others); an unknown one is used by OpenAI's API. An engine's own API key is read from
    POINTSMAN_ENGINE_KEY. The dashboard is at 127.0.0.1:8082.

    \b
    Examples:
      pointsman serve sla.yaml
      pointsman serve sla.yaml --shadow next.yaml
      pointsman serve --to http://vllm:8000
    """
    from router.operate.telemetry.logs import LogOptions, log_to
    from router.start.commands.cores import processes_of
    from router.start.commands.overrides import listening, logging_decisions
    from router.start.commands.up import Files, run, run_many
    from router.start.state import name_for
    from router.terminal import inert_console

    if (file is None) == (not to):
        raise typer.BadParameter("write either FILE or --to URL, such as: pointsman serve --to http://127.0.0.1:8000")
    notices = log_to(inert_console(stderr=True), LogOptions(json_logs, verbose, access_log))
    count = processes_of(processes)
    # of several processes, their parent tells about the file and its state
    is_told = process is None
    contents = None if file is None else kept(started_with(file), is_told=is_told)
    if contents is not None:
        config = contents.config
    else:
        config = kept_for(config_for(to or (), ca), name_for("to", " ".join(sorted(to or ()))), is_told=is_told)
    # one of several processes has the admin port only if it is asked for
    usual_admin = contents is None and count == 1 and process is None
    config = listening(config, http, grpc, admin, picker, metrics, usual_admin=usual_admin)
    config = logging_decisions(config, decisions)
    local = [pool.name for pool in config.pools.values() if pool.local]
    if local:
        fail(
            f"pool {local[0]!r} has `local:` shards, which `serve` does not start",
            "use `pointsman up`, or `at:` addresses",
        )
    if count > 1 and process is None:
        if not run_many(config, count, sys.argv[1:]):
            raise typer.Exit(1)
        return
    files = Files(contents, started_with(shadow) if shadow else None)
    run(config, files, notices, local=False, process=process, store=process_store)


@app.command(
    short_help="One shard of our own engine.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[OPTIONS]",
)
def shard(context: typer.Context) -> None:
    """Run one shard of our own engine; `pointsman shard --help` lists its options."""
    from router.start.commands.engine_program import become

    become("shards", context.args)


@app.command(
    short_help="A model's checkpoint in fewer bits.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="MODEL TARGET [OPTIONS]",
)
def quantize(context: typer.Context) -> None:
    """Write a model's checkpoint in fewer bits; `pointsman quantize --help` lists its options."""
    from router.start.commands.engine_program import become

    become("shards.quant", context.args)


@app.command(short_help="Every mistake in FILE, with its line.")
def check(
    file: SlaFile,
    without_secrets: Annotated[
        bool,
        typer.Option(
            "--without-secrets",
            help="Values of ${env:NAME} and ${file:path} may be absent, as in CI; each is printed as not checked.",
        ),
    ] = False,
) -> None:
    """Report every mistake in FILE with its line, path and probable correction. Exits with 1 if there is any.

    Proves that every request matches a rule and that every rule is reached. Legal settings that are probably not
    intended, and what would keep this machine from serving FILE now (certificates, folders, packages, checkpoints), are
    warnings and do not change the exit status.

    \b
    Examples:
      pointsman check sla.yaml
      pointsman check sla.yaml --without-secrets
    """
    from router.fleet.feeds.options import unheard
    from router.start.preflight import doubts_at_start

    contents = started_with(file, may_be_absent=without_secrets)
    config = contents.config
    for absent in contents.unchecked:
        print(f"not checked: {absent}", file=sys.stderr)  # noqa: T201
    for doubt in (*unheard(config.pools.values()), *doubts_at_start(config)):
        _warn(doubt)
    counts = (
        _counted(config.classes, "class", "classes"),
        _counted(config.rules, "rule", "rules"),
        _counted(config.pools, "pool", "pools"),
    )
    print(f"{file} is sound: {', '.join(counts)}.")  # noqa: T201
    print(f"  classes by rank: {', '.join(config.classes)}")  # noqa: T201
    print(f"  tenants: {', '.join(config.tenants)}\n  version: {config.version}")  # noqa: T201


def _counted(things: Sized, singular: str, plural: str) -> str:
    return f"{len(things)} {singular if len(things) == 1 else plural}"


@app.command(short_help="A first FILE, from answers, options or LiteLLM's config.yaml.")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The SLA file to write, or - to print it.")] = Path(
        "sla.yaml"
    ),
    to: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine that already runs; may be repeated.")
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A tenant, which gets a key; may be repeated.")
    ] = None,
    ttft: Annotated[str | None, typer.Option(help="Target for 95% of first tokens: 800ms.")] = None,
    budget: Annotated[str | None, typer.Option(help="Budget of each tenant a month: 20 USD.")] = None,
    from_litellm: Annotated[Path | None, typer.Option(metavar="FILE", help="LiteLLM's config.yaml.")] = None,
    litellm_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its /key/list?return_full_object=true, as JSON.")
    ] = None,
    litellm_teams: Annotated[Path | None, typer.Option(metavar="FILE", help="Its /team/list, as JSON.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
) -> None:
    """Write a first SLA file. Asks for engines, tenants, a target and a budget, unless options say them.

    New keys are printed once; the file has their hashes. From LiteLLM's config.yaml it takes models, addresses,
    prices, budgets, limits and stores; what has no counterpart is listed in the file, with the reason.

    \b
    Examples:
      pointsman init
      pointsman init sla.yaml --to http://vllm:8000 --tenant search --tenant ads --ttft 800ms --budget "20 USD"
      pointsman init sla.yaml --from-litellm config.yaml --litellm-keys keys.json --litellm-teams teams.json
    """
    from router.start.commands import init as commands

    commands.require_new(file)
    if from_litellm is not None:
        made = commands.made_from_litellm(from_litellm, litellm_keys, litellm_teams)
    else:
        options = commands.Wishes(to or (), tenant or (), ttft, budget)
        is_asked = options == commands.Wishes() and not yes and sys.stdin.isatty()
        made = commands.made(commands.asked() if is_asked else options)
    commands.write(file, made.text)
    for name, key in made.keys.items():
        print(f"key of {name}, shown only now: {key}", file=sys.stderr)  # noqa: T201
    if str(file) != "-":
        # references to secrets are the reader's to set before it can be served
        follows = f"check {file} --without-secrets" if "${" in made.text else f"serve {file}"
        print(f"wrote {file}; next: pointsman {follows}", file=sys.stderr)  # noqa: T201


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
    tenant: Annotated[str | None, typer.Option(help="Tenant to ask as (default: the anonymous tenant).")] = None,
    model: Annotated[str | None, typer.Option(help="The model (default: the first in FILE).")] = None,
    priority: Annotated[str | None, typer.Option(help="The class that the caller asks for.")] = None,
    max_output: Annotated[str, typer.Option(help="The longest answer, in tokens.")] = "512",
    session: Annotated[str | None, typer.Option(help="The caller's session.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; may be repeated.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An entry of the metadata; may be repeated.")
    ] = None,
    fact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Another fact that a rule tests, such as stream=true; may be repeated."
        ),
    ] = None,
    cached: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND=TOKENS", help="Prompt tokens that a backend holds.")
    ] = None,
    load: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND=REQUESTS", help="Running requests of a backend.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole record as JSON.")] = False,
) -> None:
    """Show what FILE would do with a request, and why: rule, class with targets and steps on a miss, pools,
    policy, drops, scores. Starts nothing.

    Assumes that backends are well, idle, empty and serve the model; options change that.

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
            facts=dict(map(read_pair, fact or ())),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    explanation = explain_on_paper(described, config)
    print(as_json(explanation).decode() if json else as_text(explanation))  # noqa: T201


@app.command(short_help="Simulate a day of requests under FILE.")
def simulate(
    file: SlaFile,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A trace: Mooncake's JSON lines, or Azure's or BurstGPT's CSV, see docs/capacity.md."
        ),
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A decision log of `serve`, to replay its requests.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE2", help="A second SLA file for the same requests, side by side.")
    ] = None,
    find_backends: Annotated[
        str | None, typer.Option(metavar="POOL", help="Find the fewest backends of POOL that meet every target.")
    ] = None,
    backends: Annotated[
        list[str] | None, typer.Option(metavar="POOL=N,...", help="Number of backends of a pool (default: from FILE).")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Speed and KV of each pool, YAML (default: an 8B model on one H200)."),
    ] = None,
    against_profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A second profile for the same requests, side by side.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Factor of the arrival rate: 2 doubles the load.")] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Only the first N lines.", min=1)] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of lines that name none.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of lines that name none.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws; the same seed gives the same result.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the results as JSON; - is stdout.")] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write the simulated router's decision log, for `diagnose`.")
    ] = None,
) -> None:
    """Simulate a day of requests under FILE: TTFT of each class against its target, rejections, cost per tenant,
    load of each backend. Starts nothing.

    The router's own pipeline and the shards' own scheduler run on a virtual clock; only the models' work is simulated.

    \b
    Examples:
      pointsman simulate sla.yaml --trace day.jsonl
      pointsman simulate sla.yaml --trace day.jsonl --speed 2 --backends own=8
      pointsman simulate sla.yaml --decisions decisions.jsonl --against changed.yaml
      pointsman simulate sla.yaml --trace day.jsonl --profile now.yaml --against-profile with-links.yaml
      pointsman simulate sla.yaml --trace day.jsonl --find-backends own
    """
    from router.start.commands.overrides import read_counts
    from simulation.command import Wanted, run

    if not speed > 0:
        raise typer.BadParameter("--speed must be above 0")
    is_compared = against is not None or against_profile is not None
    if find_backends is not None and is_compared:
        raise typer.BadParameter("--find-backends is for one file; leave --against out")
    if log is not None and (is_compared or find_backends is not None):
        raise typer.BadParameter("--log is for one simulation; leave --against and --find-backends out")
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
            against_profile=against_profile,
            counts=counts,
            speed=speed,
            most=requests,
            tenant=tenant,
            model=model,
            seed=seed,
            find=find_backends,
            json=json,
            log=log,
        )
    )


@app.command(short_help="Why hit rate, TTFT and TPOT are what they are.")
def diagnose(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG", help="Decision logs of routers in front of the same backends.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Draw the result as SVG, too.")] = None,
    cache_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="KV cache of each backend that does not report its size: 500k (default: infinite)."
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Only the last N requests; 100,000 take about 300 MB.", min=1)
    ] = 100_000,
) -> None:
    """Explain hit rate, TTFT and TPOT of the requests in decision logs. Starts nothing.

    From the ideal hit rate (one infinite cache for all prompts) it subtracts the losses in order: too small caches,
    cache domains, copies, placement, index errors, overlap, evictions of engines. What is left was measured. Each
    missed target is divided into seconds of queue, prefill, interference and slow backends. Every cause comes with
    examples and with the setting that changes it.

    Routers write logs with `serve --decisions LOG`, simulated ones with `simulate --log LOG`.

    \b
    Examples:
      pointsman diagnose decisions.jsonl
      pointsman diagnose decisions.jsonl.1 decisions.jsonl --picture diagnosis.svg
      pointsman diagnose decisions.jsonl --json > diagnosis.json
    """
    from policies.quantities import read_tokens
    from router.operate.diagnose.command import DiagnoseOptions, run

    try:
        size = None if cache_tokens is None else read_tokens(cache_tokens)
    except ValueError as error:
        raise typer.BadParameter(f"--cache-tokens: {error}") from error
    run(DiagnoseOptions(logs, json=json, picture=picture, cache_tokens=size, most=requests))


@app.command(short_help="How many backends the requests of a log needed.")
def plan(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG", help="Decision logs of routers in front of the same backends.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    requests: Annotated[
        int, typer.Option(help="Only the last N requests; 100,000 take about 300 MB.", min=1)
    ] = 100_000,
) -> None:
    """Estimate from decision logs how many backends each pool needed in each hour to meet its classes' TTFT and TPOT
    targets. Starts nothing.

    Divides the P95 of the pool's load by the load at which one backend still met the targets. The peak hour gives the
    number. Requests that reached no backend count as demand. `simulate --find-backends` verifies the number.

    \b
    Examples:
      pointsman plan decisions.jsonl
      pointsman plan decisions.jsonl.1 decisions.jsonl --requests 1000000
      pointsman plan decisions.jsonl --json > plan.json
    """
    from router.operate.plan.command import PlanOptions, run

    run(PlanOptions(logs, json=json, most=requests))


@app.command(short_help="What tenants used and what it cost.")
def usage(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The SLA file (YAML).", show_default=False)
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="NAMES", help="Sums by these: hour, day or month, and the names of columns.")
    ] = "tenant,model",
    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="From this hour, UTC (default: this month's first).")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Before this hour, UTC.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table, csv, json or focus.")] = "table",  # noqa: A002
    admin: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A running router's address for operators, in place of FILE."),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Show the usage that the routers under FILE have kept: requests, tokens and cost. Needs no running router.

    It is where FILE's section usage says, else in the router's state folder. Columns are tenant, key, user, model,
    service_class, pool, kind and currency. focus is the FinOps Foundation's FOCUS 1.0, as CSV.

    \b
    Examples:
      pointsman usage sla.yaml
      pointsman usage sla.yaml --by month,tenant --from 2026-01-01 --format csv
      pointsman usage sla.yaml --tenant search --by day,user
      pointsman usage --admin https://router:8082 --ca ca.crt
      pointsman usage sla.yaml --format focus --from 2026-11-01 --to 2026-12-01 > focus.csv
    """
    from router.start.commands.usage import FORMATS, run, run_at
    from router.start.state import name_of, state_of, usual_folder

    if format not in FORMATS:
        raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}, not {format}")
    if (file is None) == (admin is None):
        raise typer.BadParameter("write either FILE or --admin HOST:PORT, such as: pointsman usage sla.yaml")
    every = {"by": by, "from": since, "to": until, "tenant": tenant}
    asked = {name: text for name, text in every.items() if text is not None}
    if admin is not None:
        run_at(admin_port(admin, ca, cert, key), asked, format)
    elif file is not None:
        config, name = started_with(file).config, name_of(file)
        run(state_of(config, lambda: usual_folder(os.environ, name)).fill(config), asked, format)


@app.command(short_help="The audit log: check it, print it, export it.")
def audit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The log, as audit.file names it.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Check every line and print the result alone.")] = False,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table, json (lines) or csv.")] = "table",  # noqa: A002
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help="From this time, UTC.")] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Before this time, UTC.")] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="NUMBER:SEAL", help="A record that the log must have, as the router's own log names it."),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The secret of audit.secret (or POINTSMAN_AUDIT_SECRET).")
    ] = None,
) -> None:
    """Print the records of an audit log, older files FILE.1, FILE.2 and so on first. Needs no running router.

    Every line is checked on the way: the first bad one ends the output, is named on stderr, and the status is 1.

    \b
    Examples:
      pointsman audit audit.log
      pointsman audit audit.log --verify
      pointsman audit audit.log --from 2026-11-01 --format csv > audit.csv
    """
    from router.operate.audit.reader import AuditPeriod
    from router.start.commands.audit import FORMATS, AuditOptions, read_head, run

    if format not in FORMATS:
        raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}, not {format}")
    options = AuditOptions(verify, format, AuditPeriod.read(since, until), read_head(head), secret_file)
    if not run(file, options):
        raise typer.Exit(1)


@app.command(short_help="No new requests for a backend; --undo: again.")
def drain(
    backends: Annotated[list[str], typer.Argument(metavar="BACKEND", help="Backends by name, such as own-1.")],
    admin: AdminAt = USUAL_ADMIN,
    undo: Annotated[bool, typer.Option("--undo", help="Use them again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when their running requests have ended.")] = False,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Send no new requests to BACKEND; running ones end normally. This router alone, until it restarts.

    Reads an admin key from POINTSMAN_ADMIN_KEY.

    \b
    Examples:
      pointsman drain own-1 --wait
      pointsman drain own-1 --undo
    """
    from router.start.commands import drain as commands

    if undo and wait:
        raise typer.BadParameter("--wait needs a drain: leave out --undo")
    port = admin_port(admin, ca, cert, key)
    commands.drain(port, backends, draining=not undo)
    if wait:
        commands.wait(port, backends)


@app.command(short_help="The dashboard in a terminal.")
def top(
    admin: AdminAt = USUAL_ADMIN,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Show classes against their targets, tenants, backends and decisions as they come, until Ctrl-C.

    Reads an admin key from POINTSMAN_ADMIN_KEY. In a browser: http://127.0.0.1:8082/dashboard

    \b
    Examples:
      pointsman top
      pointsman top --admin 10.0.0.7:8082
      pointsman top --admin https://10.0.0.7:8082 --ca ca.crt --cert tls.crt --key tls.key
    """
    from router.operate.dashboard.top import run

    run(admin, once=once, tls=TlsSettings(cert, key, ca))


@app.command(short_help="A chat with a router, in the terminal or a pipe.")
def chat(
    question: Annotated[
        list[str] | None, typer.Argument(metavar="QUESTION", help="One question (default: ask in the terminal).")
    ] = None,
    at: At = USUAL_AT,
    model: Annotated[str | None, typer.Option(help="The model (default: the first that the router lists).")] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer, in tokens.", min=1)] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Chat with a router, or with any server that speaks OpenAI's API. Answers are streamed.

    Behind each answer: its backend and class, how many tokens of the prompt came from a cache, and the times. In a
    pipe the answer is written to stdout and that line to stderr. Piped text is put before QUESTION: questions about one
    document then begin with the same tokens, which a cache has.

    Reads an API key from POINTSMAN_KEY.

    \b
    Examples:
      pointsman chat
      pointsman chat "Why is the sky blue?"
      pointsman chat "Summarize this" < report.txt > summary.txt
    """
    from router.client.chat import ChatOptions, run

    words = " ".join(question or ())
    run(
        ChatOptions(
            at,
            model=model,
            system=system,
            max_tokens=max_tokens,
            question=words or None,
            tls=TlsSettings(cert, key, ca),
        )
    )


@app.command(short_help="Load for a router: percentiles of TTFT, TPOT, end to end.")
def bench(
    at: At = USUAL_AT,
    model: Annotated[str | None, typer.Option(help="The model (default: the first that the router lists).")] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1, max=100_000)] = 100,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: requests at a time (default: 8).", min=1, max=1000)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="Open loop: N requests per second on average.")
    ] = None,
    words: Annotated[int, typer.Option(help="Words of a prompt.", min=1, max=1_000_000)] = 500,
    shared_words: Annotated[
        int, typer.Option(help="Words at the beginning that all prompts share, so that a cache has them.", min=0)
    ] = 250,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals; another one finds nothing in caches.")] = 0,
    picture: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Draw the times as SVG, too.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the results as JSON, too.")] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
) -> None:
    """Put load on a router, or on any server that speaks OpenAI's API, and print the percentiles of its times.

    A closed loop has CONCURRENCY clients, each with one request at a time: it shows the greatest throughput. An open
    loop (--rate) sends requests when they are due, answered or not, as many independent users do: it shows the times
    at a load. There, times count from when a request was due.

    TTFT is the time to the first token, TPOT the time per token after it. Exits with 1 if a request fails. Reads an
    API key from POINTSMAN_KEY.

    \b
    Examples:
      pointsman bench
      pointsman bench --rate 5 --requests 300 --picture bench.svg
      pointsman bench --at http://vllm:8000 --words 2000 --shared-words 1800
    """
    from router.client.bench import BenchOptions, run
    from router.client.load import Load

    if rate is not None and not 0 < rate <= 10_000:
        raise typer.BadParameter("--rate must be above 0 and at most 10,000")
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("--concurrency is for a closed loop, --rate for an open one: leave out one of them")
    load = Load(requests, concurrency or 8, rate, words, shared_words, seed)
    tls = TlsSettings(cert, key, ca)
    if not run(BenchOptions(at, load, model=model, max_tokens=max_tokens, picture=picture, json=json, tls=tls)):
        raise typer.Exit(1)


def started_with(file: Path, *, may_be_absent: bool = False) -> Contents:
    """The contents of `file`, as from `opened`; prints doubtful settings as warnings."""
    contents = opened(file, may_be_absent=may_be_absent)
    for doubt in contents.doubts:
        _warn(doubt)
    return contents


def opened(file: Path, *, may_be_absent: bool = False) -> Contents:
    """The contents of `file`; prints every mistake and exits with 1 if there is one.

    `may_be_absent`: values that the file refers to need not be there.
    """
    from router.start.config_file import ConfigFile
    from router.start.plugins import installed_catalogue

    try:
        return ConfigFile(file, os.environ, installed_catalogue(), may_be_absent).read()
    except ExpectedError as error:
        fail(str(error), "" if file.exists() else f"`pointsman init {file}` writes a first one")


def kept(contents: Contents, *, is_told: bool = True) -> Contents:
    """`contents` with a place in the state folder for what the file gives none."""
    from router.start.state import kept as kept_where

    return kept_where(contents, os.environ, _warn if is_told else lambda _: None)


def kept_for(config: Config, name: str, *, is_told: bool = True) -> Config:
    """The same without a file, for the router called `name`."""
    from router.start.state import state_of, usable, usual_folder

    state = state_of(config, lambda: usual_folder(os.environ, name))
    return usable(state, config, _warn if is_told else lambda _: None).fill(config)


def _warn(sentence: str) -> None:
    tell(f"warning: {sentence}", logging.WARNING)


def config_for(addresses: Sequence[str], ca: str | None = None) -> Config:
    """The Config of a router in front of the engines at `addresses`; prints what each is, and the file.

    `ca` is the file of their authorities. Raises ConfigError for an address without an engine.
    """
    from policies.sla.parse import parse
    from router.start.commands.engines import KEY_VARIABLE, file_for, find_engine

    key = os.environ.get(KEY_VARIABLE)
    engines = tuple(dict.fromkeys(find_engine(address, key, ca) for address in addresses))
    text = file_for(engines, has_key=bool(key), ca=ca)
    lines = (*text.splitlines(), f'server: {{admin: "{USUAL_ADMIN}"}}')
    shown = "\n".join(f"  {line}" for line in lines)
    for engine in engines:
        tell(str(engine))
    tell(f"The same as a file, for `pointsman serve FILE`:\n{shown}")
    return parse(text, source="--to", environment=os.environ)


def fail(message: str, hint: str = "") -> NoReturn:
    """Print `message` for a person and exit with 1."""
    tell(f"{message}\n  {hint}" if hint else message, logging.ERROR)
    raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    # a process that we start runs another program at once: gRPC's handlers of forks would only wait for its threads
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    give_stacks()
    try:
        with inert_output(), whole_descriptions(os.environ):
            app()
    except ExpectedError as error:
        tell(inert(str(error)), logging.ERROR)
        sys.exit(1)
