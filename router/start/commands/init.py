"""`pointsman init`: a first SLA file, from answers or options, or from a config.yaml of LiteLLM."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from policies.errors import ConfigError
from policies.keys import PREFIX, hash_of
from policies.nouns import NO_TENANT
from policies.quantities import read_budget, read_seconds
from policies.shapes import NAME_PATTERN
from router.start.commands.engines import KEY_VARIABLE, Engine, file_for, find_engine
from router.start.commands.from_litellm import sla_file_of

_PLACEHOLDER = """\
# No engine was named: replace the kind and the address by those of yours, see docs/backends.md.
pools:
  own: {kind: vllm, at: ["http://127.0.0.1:8000"]}
"""


class Wishes(NamedTuple):
    """What the file is to have: the addresses of `engines`, the names of `tenants`, a target for the first token
    (`800ms`) and a budget of each tenant a month (`20 USD`); None for neither."""

    engines: Sequence[str] = ()
    tenants: Sequence[str] = ()
    ttft: str | None = None
    budget: str | None = None


class FirstFile(NamedTuple):
    """The text of the file, and each tenant's new key, which the file has as a hash only."""

    text: str
    keys: Mapping[str, str]


def asked() -> Wishes:
    """The wishes of a person at a terminal."""
    import typer

    engines = typer.prompt("Addresses of engines that run, with spaces between (empty: none yet)", default="")
    tenants = typer.prompt("Tenants, with spaces between (empty: one that needs no key)", default="")
    ttft = typer.prompt("Target for the first token, such as 800ms (empty: none)", default="")
    budget = typer.prompt("Budget of each tenant a month, such as 20 USD (empty: none)", default="")
    return Wishes(engines.split(), tenants.split(), ttft or None, budget or None)


def made(wishes: Wishes) -> FirstFile:
    """The file. Raises ConfigError for an address without an engine, and for a wish that cannot be written."""
    key = os.environ.get(KEY_VARIABLE)
    engines: list[Engine] = [find_engine(address, key) for address in wishes.engines]
    for engine in engines:
        print(engine, file=sys.stderr)  # noqa: T201
    for name in wishes.tenants:
        if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
            raise ConfigError(f"'{name[:80]}' is no name of a tenant", hint="use letters, digits, '.', '_' and '-'")
        if name == NO_TENANT:
            raise ConfigError(f"'{name}' stands for requests without a valid key", hint="choose another name")
    keys = {name: PREFIX + secrets.token_urlsafe(32) for name in dict.fromkeys(wishes.tenants)}
    lines = ["# Made by `pointsman init`; docs/sla.md has every key. Changes take effect within two seconds."]
    if wishes.ttft is not None:
        lines += ["classes:", f"  interactive: {{ttft_p95: {_checked(wishes.ttft, '--ttft')}}}"]
    currency = None
    limits = ""
    if wishes.budget is not None:
        budget, currency = _budget(wishes.budget)
        limits = f", limits: {{budget_per_month: {budget}}}"
    lines.append("tenants:")
    lines += [f'  {_as_key(name)}: {{keys: ["sha256:{hash_of(text)}"]{limits}}}' for name, text in keys.items()]
    if not keys:
        lines.append(f"  local: {{anonymous: true{limits}}}")
    if currency is not None:
        lines += [
            f"# {currency} per million tokens: replace these by your prices.",
            f"cost: {{currency: {currency}, uncached: 1, cached: 0.1, output: 4}}",
        ]
    pools = file_for(engines, has_key=bool(key)) if engines else _PLACEHOLDER
    lines.append(pools.rstrip("\n"))
    if wishes.ttft is not None:
        lines += ["rules:", "  - {class: interactive}"]
    lines.append('server: {admin: "127.0.0.1:8082"}')
    return FirstFile("\n".join((*lines, "")), keys)


def made_from_litellm(config: Path, keys: Path | None, teams: Path | None) -> FirstFile:
    """The file that does what `config` does, with the `keys` and `teams` that LiteLLM lists. Raises ConfigError."""
    loaded = _loaded(config, yaml.safe_load)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{config} is no config.yaml of LiteLLM", hint="it has a model_list")
    listed = [_records(path, name) for path, name in ((keys, "keys"), (teams, "teams"))]
    return FirstFile(sla_file_of(loaded, keys=listed[0], teams=listed[1], environment=os.environ), {})


def require_new(path: Path) -> None:
    """Raise ConfigError if the file is there, before questions are asked and keys are made."""
    if str(path) != "-" and path.exists():
        raise _taken(path)


def write(path: Path, text: str) -> None:
    """Write `text` to a new file, or to stdout for `-`. Raises ConfigError if the file is there."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="name another file") from error


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"{path} is there already", hint="name another file, or - to print it")


def _as_key(name: str) -> str:
    """`name` as a key of YAML: in quotes where that would not be text, such as null and 1."""
    return name if yaml.safe_load(name) == name else f'"{name}"'


def _checked(text: str, option: str) -> str:
    try:
        read_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option} {error}", hint="write it as 800ms or 2s") from error
    return text


def _budget(text: str) -> tuple[str, str]:
    try:
        budget = read_budget(text)
    except ValueError as error:
        raise ConfigError(f"--budget {error}", hint="write it as 20 USD") from error
    if budget.currency is None:
        raise ConfigError("--budget has no currency", hint="write it as 20 USD")
    return text, budget.currency


def _loaded(path: Path, load: Any) -> Any:
    try:
        return load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="check the path") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {str(error).splitlines()[0]}", hint="is it the right file?"
        ) from error


def _records(path: Path | None, name: str) -> list[dict[str, Any]]:
    """The records of one of LiteLLM's lists, alone or below `keys` or `teams`."""
    if path is None:
        return []
    loaded = _loaded(path, json.loads)
    records = loaded.get(name) if isinstance(loaded, dict) else loaded
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        hint = f"GET /{name[:-1]}/list of LiteLLM" + (", with return_full_object=true" if name == "keys" else "")
        raise ConfigError(f"{path} is no list of {name}", hint=hint)
    return records
