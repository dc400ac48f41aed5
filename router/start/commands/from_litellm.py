"""The SLA file that does what a config.yaml of LiteLLM does, with the keys and teams of its lists.

What has no counterpart stands as comments at the end, with a reason. Secrets become references; keys of LiteLLM keep
working, because it lists their SHA-256 as `token`, and so does the SLA file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from policies.quantities import CURRENCY_UNITS, MOST_BUDGET, read_count

_KINDS = {
    **dict.fromkeys(("vllm", "hosted_vllm"), "vllm"),
    **dict.fromkeys(("openai", "text-completion-openai"), "openai"),
    **dict.fromkeys(("azure", "azure_text"), "azure"),
    "anthropic": "anthropic",
    **dict.fromkeys(("ollama", "ollama_chat"), "ollama"),
    **dict.fromkeys(
        ("openai_like", "custom_openai", "lm_studio", "llamafile", "litellm_proxy", "openrouter", "groq", "deepseek"),
        "openai_compatible",
    ),
}
"""LiteLLM's prefix of a model -> the kind of a pool."""

_USUAL_AT = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "ollama": "http://localhost:11434",
    "openrouter": "https://openrouter.ai/api/v1",
    "groq": "https://api.groq.com/openai/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "lm_studio": "http://localhost:1234/v1",
}
"""The address of a prefix that needs none in LiteLLM."""

_PERIODS = {
    **dict.fromkeys(("1h", "60m", "3600s"), "hour"),
    **dict.fromkeys(("1d", "24h", "86400s"), "day"),
    **dict.fromkeys(("7d", "1w"), "week"),
    **dict.fromkeys(("30d", "1mo", "31d", "28d"), "month"),
}
"""LiteLLM's `budget_duration` -> the period of a budget."""

_RATES = {
    "rpm_limit": "requests_per_minute",
    "tpm_limit": "tokens_per_minute",
    "max_parallel_requests": "concurrent",
}

_COSTS = {
    "input_cost_per_token": "uncached",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cached",
    "cache_creation_input_token_cost": "cache_write",
}

_REASONS = {
    "num_retries": "requests go to other backends until the client has seen an answer; there is no number to set",
    "request_timeout": "timeouts follow from what each backend was seen to take: docs/sla.md#timeouts",
    "timeout": "timeouts follow from what each backend was seen to take: docs/sla.md#timeouts",
    "fallbacks": "other backends of a model are tried by themselves; another model by on_miss: [{degrade: MODEL}]",
    "default_fallbacks": "another model is tried by on_miss: [{degrade: MODEL}]",
    "context_window_fallbacks": "write a rule on prompt_tokens with other pools",
    "routing_strategy": "the policy `default` sends a request where it costs least time: docs/sla.md#policies",
    "allowed_fails": "write health: {failures: 3} into a pool",
    "cooldown_time": "write health: {retry: 1s} into a pool",
    "drop_params": "a backend of the client's dialect gets every parameter, others those that they have",
    "set_verbose": "use pointsman serve --verbose",
    "json_logs": "use pointsman serve --json-logs",
    "callbacks": "traces and metrics go to OpenTelemetry and Prometheus: docs/tracing.md",
    "success_callback": "traces and metrics go to OpenTelemetry and Prometheus: docs/tracing.md",
    "failure_callback": "traces and metrics go to OpenTelemetry and Prometheus: docs/tracing.md",
    "cache": "answers are not cached; prompts are, by the engines",
    "cache_params": "answers are not cached; prompts are, by the engines",
    "alerting": "write alerts: {webhook: URL}: docs/quotas.md#alerts",
    "guardrails": "the router changes no prompts",
    "rpm": "a backend has no rate limit; max_requests of a pool's options bounds requests at once",
    "tpm": "a backend has no rate limit; max_requests of a pool's options bounds requests at once",
    "provider_budget_config": "a pool has no budget; bind a tenant's model that only this pool serves",
    "model_max_budget": "write limits.models of a tenant or team",
    "expires": "a key in the file has no end; issue one with an expiry: pointsman keys issue",
    "blocked": "a blocked key or team is left out",
}
"""A setting -> why it is not in the file."""

_NO_COUNTERPART = "has no counterpart"


@dataclass
class _Found:
    """What is written so far. `notes` are the settings that are not in it, with reasons."""

    environment: Mapping[str, str]
    notes: dict[str, str] = field(default_factory=dict)
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    prices: dict[str, dict[str, Decimal]] = field(default_factory=dict)
    has_money: bool = False

    def note(self, path: str, reason: str | None = None) -> None:
        name = re.sub(r"\[[^]]*\]", "", path).rsplit(".", 1)[-1]
        self.notes.setdefault(path, reason or _REASONS.get(name, _NO_COUNTERPART))


def sla_file_of(
    config: Mapping[str, Any],
    *,
    keys: Sequence[Mapping[str, Any]] = (),
    teams: Sequence[Mapping[str, Any]] = (),
    environment: Mapping[str, str],
) -> str:
    """The text of the SLA file. `keys` and `teams` are the records of LiteLLM's /key/list (with
    return_full_object=true) and /team/list. Addresses in `environment` variables are read from it."""
    found = _Found(environment)
    for at, entry in enumerate(_dicts(config.get("model_list"))):
        _deployment(entry, f"model_list[{at}]", found)
    general, settings = _dict(config.get("general_settings")), _dict(config.get("litellm_settings"))
    routing = _dict(config.get("router_settings"))
    whole = _limits(settings, "litellm_settings", found)
    users = _end_users(settings, found)
    tenants = _tenants(general, keys, teams, found)
    for name, tenant in tenants.items():
        if whole:
            tenant["organization"] = "everything"
            tenant["limits"] = _within(tenant.get("limits", {}), whole, f"team {name}", found)
        if users:
            tenant["end_users"] = {"limits": users}
        if not tenant.get("limits"):
            tenant.pop("limits", None)
    file: dict[str, Any] = {}
    if whole:
        file["organizations"] = {"everything": {"limits": whole}}
    file["tenants"] = tenants
    if found.has_money or found.prices:
        file["cost"] = {"currency": "USD", "uncached": 1, "cached": 0.1, "output": 4}
        if found.prices:
            file["cost"]["models"] = {model: dict(prices) for model, prices in found.prices.items()}
    file["pools"] = found.pools
    file |= _stores(general, routing, found)
    for name, part, known in (
        ("general_settings", general, {"master_key", "database_url"}),
        ("litellm_settings", settings, {"max_budget", "budget_duration", "max_end_user_budget"}),
        ("router_settings", routing, {"redis_host", "redis_port", "redis_password", "redis_url"}),
    ):
        for key in part.keys() - known:
            found.note(f"{name}.{key}")
    for name in config.keys() - {"model_list", "general_settings", "litellm_settings", "router_settings"}:
        found.note(str(name))
    return _written(file, found)


def _deployment(entry: Mapping[str, Any], path: str, found: _Found) -> None:
    """Add one entry of the model list to a pool with the same kind, address and key."""
    params, info = _dict(entry.get("litellm_params")), _dict(entry.get("model_info"))
    name, model = (str(each or "").strip() for each in (entry.get("model_name"), params.get("model")))
    prefix, _, own = model.partition("/")
    if prefix not in _KINDS:
        prefix, own = ("anthropic" if model.startswith("claude") else "openai"), model
        if "/" in model and not params.get("api_base"):
            found.note(f"{path} ({name})", f"no kind of pool speaks to {model.partition('/')[0]}: docs/backends.md")
            return
    own = own.strip()
    if not name or not own or "*" in f"{name}{own}" or not f"{name}{own}".isprintable():
        found.note(f"{path} ({name})", "a pool names its models one by one")
        return
    pool = _pool_of(prefix, params, path, found)
    if pool is None:
        found.note(
            f"{path} ({name})", "its api_base is not known: set the environment variable that it names, or write it"
        )
        return
    kind, (at,) = pool["kind"], pool["at"]
    mine = next((each for each in found.pools.values() if each["at"] == pool["at"]), None)
    if mine is None:
        mine = found.pools[_free_name(prefix.replace("_", "-"), found.pools)] = pool
    elif mine["kind"] != kind or mine["models"].get(str(name), own) != own:
        found.note(f"{path} ({name})", f"{at} is in a pool that is of another kind, or has another model of this name")
        return
    elif mine.get("key") != pool.get("key"):
        found.note(f"{path}.litellm_params.api_key", f"{at} has one key, the first one")
    mine["models"][str(name)] = own
    if kind == "openai":
        served = mine.setdefault("options", {}).setdefault("served", [])
        if own not in served:
            served.append(own)
    prices = {ours: price for theirs, ours in _COSTS.items() if (price := _per_million({**info, **params}, theirs))}
    if prices:
        found.prices.setdefault(str(name), {}).update(prices)
    known = {"model", "api_base", "base_url", "api_key", "api_version", "max_parallel_requests", *_COSTS}
    for key in params.keys() - known:
        found.note(f"{path}.litellm_params.{key}")
    for key in entry.keys() - {"model_name", "litellm_params", "model_info"}:
        found.note(f"{path}.{key}")


def _pool_of(prefix: str, params: Mapping[str, Any], path: str, found: _Found) -> dict[str, Any] | None:
    """A pool for one deployment, without its model; None if its address is not known."""
    base = _resolved(params.get("api_base") or params.get("base_url"), found)
    at = base or _USUAL_AT.get(prefix)
    if at is None or not re.match(r"https?://[^\s/]+", at):
        return None
    is_other = _KINDS[prefix] == "openai" and base and "api.openai.com" not in base
    kind = "openai_compatible" if is_other else _KINDS[prefix]
    if kind in {"vllm", "ollama", "anthropic"}:
        at = at.rstrip("/").removesuffix("/v1")
    pool: dict[str, Any] = {"kind": kind, "at": [at.rstrip("/")], "models": {}}
    if secret := _secret(params.get("api_key"), f"{prefix}_API_KEY", f"{path}.litellm_params.api_key", found):
        pool["key"] = secret
    if params.get("api_version") and kind == "azure":
        pool["options"] = {"api_version": str(params["api_version"])}
    if isinstance(most := params.get("max_parallel_requests"), int):
        pool.setdefault("options", {})["max_requests"] = most
    return pool


def _per_million(prices: Mapping[str, Any], name: str) -> Decimal | None:
    try:
        # at most as exact as the file's prices
        return round(Decimal(str(prices[name])) * 10**6, 6).normalize() if prices.get(name) is not None else None
    except InvalidOperation:
        return None


def _tenants(
    general: Mapping[str, Any], keys: Sequence[Mapping[str, Any]], teams: Sequence[Mapping[str, Any]], found: _Found
) -> dict[str, dict[str, Any]]:
    """A tenant for each team, and one for keys without a team; without any list one with the master key."""
    tenants: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for team in teams:
        id, alias = str(team.get("team_id")), team.get("team_alias")  # noqa: A001
        if team.get("blocked"):
            found.note(f"team {id}.blocked")
            continue
        name = names[id] = _free_name(str(alias or id), tenants)
        limits = _limits(team, f"team {name}", found)
        tenants[name] = {"keys": [], **({"limits": limits} if limits else {}), **_allowed(team)}
    for key in keys:
        digest, label = str(key.get("token") or ""), key.get("key_alias") or key.get("key_name") or "a key"
        if not re.fullmatch("[0-9a-f]{64}", digest):
            found.note(f"{label}.token", "is no SHA-256 of a key: list keys with return_full_object=true")
            continue
        if key.get("blocked"):
            found.note(f"{label}.blocked")
            continue
        owner = names.get(str(key.get("team_id")), "personal")
        tenant = tenants.setdefault(owner, {"keys": []})
        limits = _within(_limits(key, str(label), found), tenant.get("limits", {}), str(label), found)
        hashed = f"sha256:{digest}"
        tenant["keys"].append({"key": hashed, "limits": limits} if limits else hashed)
        for extra in ("expires", "model_max_budget"):
            if key.get(extra):
                found.note(f"{label}.{extra}")
        if _allowed(key):
            found.note(f"{label}.models", "models are those of a tenant: make one for these keys")
    for name in [name for name, tenant in tenants.items() if not tenant["keys"]]:
        del tenants[name]
        found.note(f"team {name}", "has no key in the list of keys")
    master = general.get("master_key")
    if not tenants:
        digest = f"sha256:{hashlib.sha256(str(master).encode()).hexdigest()}"
        reference = _reference(master)
        tenants["main"] = {"keys": [reference or digest]} if master else {"anonymous": True}
    elif master:
        found.note("general_settings.master_key", "operators have keys of their own: write server.admin_keys")
    return tenants


def _limits(entry: Mapping[str, Any], path: str, found: _Found) -> dict[str, Any]:
    """The limits of a key, a team or the whole proxy."""
    limits: dict[str, Any] = {}
    for theirs, ours in _RATES.items():
        if isinstance(most := entry.get(theirs), int) and not isinstance(most, bool) and most > 0:
            try:
                limits[ours] = read_count(str(most))
            except ValueError:
                found.note(f"{path}.{theirs}", "is more than a limit can be; without one it is the same")
    for theirs, soft in (("max_budget", False), ("soft_budget", True)):
        if entry.get(theirs) is None:
            continue
        budget = _budget(entry[theirs], entry.get("budget_duration"), f"{path}.{theirs}", soft, found)
        if "budgets" in budget and "budgets" in limits:
            limits["budgets"] |= budget["budgets"]
        else:
            limits |= budget
    for name in [name for name in limits if name.startswith("soft_")]:
        hard = limits.get(name.removeprefix("soft_"))
        if hard is not None and _amount(limits[name]) >= _amount(hard):
            del limits[name]
            found.note(f"{path}.soft_budget", "is not below max_budget")
    return limits


def _within(limits: dict[str, Any], whole: Mapping[str, Any], path: str, found: _Found) -> dict[str, Any]:
    """`limits` without those that can never be reached, because one of the `whole` is reached first."""
    for name in limits.keys() & whole.keys():
        if name != "budgets" and not name.startswith("soft_") and _amount(limits[name]) > _amount(whole[name]):
            found.note(f"{path}.{name}", f"{limits[name]} is above the {whole[name]} that hold for all of them")
            limits = {other: limit for other, limit in limits.items() if other != name}
    return limits


def _amount(limit: Any) -> Decimal:
    return Decimal(str(limit).partition(" ")[0])


def _budget(most: Any, duration: Any, path: str, soft: bool, found: _Found) -> dict[str, Any]:
    try:
        amount = round(Decimal(str(most)), 6)
    except InvalidOperation:
        amount = Decimal(0)
    if amount <= 0:
        found.note(path, "a budget is above zero; to refuse everything, leave the key out")
        return {}
    if amount * CURRENCY_UNITS > MOST_BUDGET:
        found.note(path, f"a budget is at most {MOST_BUDGET // CURRENCY_UNITS} USD")
        return {}
    found.has_money = True
    cost, period = f"{amount.normalize():f} USD", _PERIODS.get(str(duration))
    if period is not None:
        return {f"{'soft_' if soft else ''}budget_per_{period}": cost}
    if duration:
        found.note(path, f"a budget of {duration} is written as one that never refills: choose a period or days")
    return {"budgets": {"soft-total" if soft else "total": {"cost": cost, **({"soft": True} if soft else {})}}}


def _end_users(settings: Mapping[str, Any], found: _Found) -> dict[str, Any]:
    most = settings.get("max_end_user_budget")
    return {} if most is None else _budget(most, None, "litellm_settings.max_end_user_budget", False, found)


def _allowed(entry: Mapping[str, Any]) -> dict[str, Any]:
    given = entry.get("models")
    texts = [str(model).strip() for model in given] if isinstance(given, list) else []
    models = [text for text in texts if text and text.isprintable() and "*" not in text]
    is_limited = models and not {"all-proxy-models", "all-team-models"} & set(models)
    return {"models": models} if is_limited else {}


def _stores(general: Mapping[str, Any], routing: Mapping[str, Any], found: _Found) -> dict[str, Any]:
    file: dict[str, Any] = {}
    if routing.get("redis_host") or routing.get("redis_url"):
        file["store"] = {"redis": "${env:REDIS_URL}"}
        found.note("router_settings.redis_*", "REDIS_URL is its address: redis://:PASSWORD@HOST:PORT/0")
    if general.get("database_url"):
        reference = _reference(general["database_url"]) or "${env:DATABASE_URL}"
        file["usage"] = {"store": reference, "journal": "usage.journal"}
    return file


def _reference(value: Any) -> str | None:
    """`${env:NAME}` of LiteLLM's os.environ/NAME; None for another text."""
    name = str(value or "").removeprefix("os.environ/")
    return f"${{env:{name}}}" if str(value).startswith("os.environ/") and re.fullmatch(r"\w+", name) else None


def _secret(value: Any, usual: str, path: str, found: _Found) -> str | None:
    if value is None:
        return None
    reference = _reference(value)
    if reference is None:
        reference = f"${{env:{re.sub(r'[^A-Z0-9]', '_', usual.upper())}}}"
        found.note(path, f"secrets do not stand in the file: set {reference[6:-1]} to it")
    return reference


def _resolved(value: Any, found: _Found) -> str | None:
    """An address, which may stand in an environment variable."""
    reference = _reference(value)
    return found.environment.get(reference[6:-1], "?") if reference else None if value is None else str(value)


def _free_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted` as a name of the file that is not `taken`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-._")[:56] or "unnamed"
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _written(file: Mapping[str, Any], found: _Found) -> str:
    lines = ["# Made from a config.yaml of LiteLLM by `pointsman init --from-litellm`; docs/sla.md has every key."]
    for section, given in file.items():
        entries = given
        if section == "cost":
            lines.append(
                "# Dollars per million tokens. LiteLLM has a list of prices of its own; these are to be replaced."
            )
        if section == "pools" and not entries:
            lines.append("# No deployment could be used, see below. This stands for the engines that are to come.")
            entries = {"own": {"kind": "vllm", "at": ["http://127.0.0.1:8000"], "models": {}}}
        if isinstance(entries, Mapping) and entries and all(isinstance(each, Mapping) for each in entries.values()):
            lines.append(f"{section}:")
            lines += [f"  {name}: {_flow(entry)}" for name, entry in entries.items()]
        else:
            lines.append(f"{section}: {_flow(entries)}")
    if found.notes:
        lines += ["", "# Not in this file:"]
        lines += [f"#   {path}: {_one_line(reason)}" for path, reason in sorted(found.notes.items())]
    return "\n".join((*(_printable(line) for line in lines), ""))


def _flow(value: Any) -> str:
    """`value` as YAML in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)}: {_flow(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)


def _key(name: Any) -> str:
    return (
        str(name) if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", str(name)) else json.dumps(str(name), ensure_ascii=False)
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _printable(line: str) -> str:
    return "".join(character if character.isprintable() else " " for character in line)
