"""The section `pools`: the backends."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

from policies.health import HealthRules
from policies.quantities import quoted, read_bounds, read_count, read_seconds, read_share, read_whole, read_yes
from policies.shapes import TEXT, Key, Many, Named, Scalar, Table, word
from policies.sla.alerts import read_webhook
from policies.sla.fields import Field, Section
from policies.sla.secrets import REFERENCE_PATTERN, Outside
from policies.sla.server import ADDRESS_PATTERN, read_address
from policies.sla.sources import PATTERN as SOURCE_PATTERN
from policies.sla.sources import SourceName, is_source, read_source
from policies.sla.tls import CLIENT_TLS, read_client
from policies.suggest import did_you_mean
from policies.timeouts import Timeouts, timeouts_of
from policies.wake import Wake
from tls.settings import TlsSettings

AT_HOST_AND_PORT = frozenset({"shard", "fake"})
"""Kinds with addresses of the form host:port; the others have a URL."""

PACKAGED = frozenset({"smollm2"})
"""Models that shards find in an installed package."""

BUNDLED = "bundled"
"""The model that comes with Pointsman, as `PoolSpec.model`."""

Option = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Backends of one kind that serve one model.

    `at` are their addresses; `sources` discover more at run time; with `register` backends announce
    themselves. `health` defines when one counts as ill. `pointsman up` starts `local` shard processes beside the
    router, with `model`: a checkpoint's path or "bundled". Otherwise `model` is the name that clients and
    backend both use, and `models` maps clients' names to the backend's. `key` is the backend's own API key. `options`
    go to the backend as text. `tokenizer` is a directory or a name of the Hugging Face Hub, `chat_template` a file;
    both replace those of the backends. `tls` is for connections to its backends: None is plain text for shards, and for
    others what their URL says. The backends of the pool `prefill` compute long prompts for these.
    With `wake` it may have no backend, and is started when a request comes.
    """

    name: str
    kind: str = "shard"
    at: tuple[str, ...] = ()
    sources: tuple[SourceName, ...] = ()
    register: bool = False
    local: int = 0
    model: str | None = None
    models: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key: str | None = dataclasses.field(default=None, repr=False)
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    tokenizer: str | None = None
    chat_template: str | None = None
    health: HealthRules = dataclasses.field(default_factory=HealthRules)
    tls: TlsSettings | None = None
    prefill: str | None = None
    wake: Wake | None = None

    @property
    def is_found(self) -> bool:
        """Whether its backends are discovered at run time."""
        return bool(self.sources) or self.register

    def reachable(self, address: str) -> str:
        """`address` in the form of its kind: sources return host:port, and most kinds have a URL."""
        if self.kind in AT_HOST_AND_PORT or "://" in address:
            return address
        return f"http://{address}" if self.tls is None else f"https://{address}"


_URL_PATTERN = r"https?://[^\s/?#@]+(?:/[^\s?#]*)?"
_URL = re.compile(_URL_PATTERN)
_MOST_LOCAL = 64

_PLACE_PATTERN = f"{ADDRESS_PATTERN}|{_URL_PATTERN}|{SOURCE_PATTERN}|{REFERENCE_PATTERN}"
PLACE = Scalar(str, {"type": "string", "pattern": rf"^\s*({_PLACE_PATTERN})\s*$"})
SECRET = Scalar(str, {"type": "string", "pattern": rf"^\s*{REFERENCE_PATTERN}\s*$"})

HEALTH = Table(
    {
        "failures": Key(read_count, "failed requests or probes in a row that make a backend ill; default 3"),
        "failure_share": Key(read_share, "share of failures of at least 20 requests in 30s that does too; default 50%"),
        "probe_every": Key(read_seconds, "time between two probes; default 2s"),
        "probe_timeout": Key(read_seconds, "timeout of a probe; default 5s"),
        "suspect_after": Key(
            read_seconds,
            "time without a sign of life, after which requests go elsewhere; default 3s",
        ),
        "first_byte": Key(read_bounds, "timeout until a backend begins to answer, floor..ceiling; default 5s..10m"),
        "first_token": Key(read_bounds, "timeout until the first token, floor..ceiling; default 5s..10m"),
        "between_tokens": Key(read_bounds, "timeout between two tokens, floor..ceiling; default 20s..10m"),
        "retry": Key(read_seconds, "time without requests after failures; doubles up to a minute; default 1s"),
        "slow_start": Key(read_seconds, "time in which its share of requests grows after recovery; default 10s"),
    }
)
WAKE = Table(
    {
        "within": Key(read_seconds, "how long a request waits for it to start, such as 3m", required=True),
        "url": Key(TEXT, "an http or https URL that is POSTed, or ${env:NAME}; default none"),
        "secret": Key(SECRET, "${env:NAME} or ${file:path}: signs it; default: no signature"),
        "command": Key(Many(TEXT), "a command that is run instead, with the pool's name behind it; default none"),
    }
)
NO_TOKENIZER = "none"
"""Instead of a tokenizer: the checkpoint that the engine names is not searched, and lengths are estimated."""


def pool_table(kinds: Collection[str] | None) -> Table:
    """The form of a pool in the file, with these kinds of backends; None: any."""
    kind = TEXT if kinds is None else word(*kinds)
    return Table(
        {
            "kind": Key(kind, "the kind of its backends; default shard, our own engine"),
            "at": Key(
                Many(PLACE), "host:port of shards, http://host:port of others; dns://, srv:// or k8s:// find them"
            ),
            "register": Key(read_yes, "true: backends may announce themselves at the operators' port; default false"),
            "local": Key(read_whole, "number of shards that `pointsman up` starts beside the router; instead of `at`"),
            "model": Key(TEXT, "local shards: a checkpoint's directory, or bundled; others: the model's name"),
            "models": Key(Named(TEXT, free=True), "clients' model names: the backend's names"),
            "key": Key(SECRET, "the backend's own API key, as ${env:NAME} or ${file:path}"),
            "tls": Key(
                CLIENT_TLS, "certificates for connections to its backends; default: https:// alone, without ours"
            ),
            "health": Key(HEALTH, "when a backend counts as ill, and how it recovers"),
            "options": Key(
                Named(Many(TEXT), free=True), "settings for the backend, passed on as text or lists of texts"
            ),
            "prefill": Key(
                TEXT, "shard, vllm: the pool of backends that compute long prompts for these, and nothing else"
            ),
            "wake": Key(WAKE, "how a pool that is scaled to zero is started when a request comes; default not at all"),
            "tokenizer": Key(
                TEXT,
                "a directory with tokenizer.json, or a model of the Hugging Face Hub; none: estimate",
            ),
            "chat_template": Key(
                TEXT, "a file with the chat template, if the backend uses another one than its model's"
            ),
        }
    )


def pools_shape(kinds: Collection[str] | None) -> Named:
    """The section `pools`, with these kinds of backends; None: any."""
    return Named(pool_table(kinds))


def read_pools(field: Field | None, *, kinds: Collection[str] | None, outside: Outside) -> dict[str, PoolSpec]:
    """Pools by name, of these kinds (None: of any); two local shards with the bundled model, called `own`, if the file
    has none."""
    fields = field.named_entries() if field else {}
    if "any" in fields:
        fields["any"].complain("a pool cannot be called 'any': in rules it means all pools")
    pools = {name: _read_pool(entry, name, kinds, outside) for name, entry in fields.items()}
    _refuse_repeated_addresses(fields, pools)
    _check_prefill(fields, pools)
    return pools or {"own": PoolSpec("own", local=2, model=BUNDLED)}


def read_url(text: str) -> str:
    """An http or https address without query. Raises ValueError with a sentence."""
    if "@" in text:
        raise ValueError("must not contain a user or a password (they belong in key)")
    if not (_URL.fullmatch(text) and _names_a_host(text)):
        raise ValueError(f"must be an address like http://host:8000, not {quoted(text)}")
    return text.rstrip("/")


def _names_a_host(url: str) -> bool:
    """Whether its host and its port are such that a client can ask for them."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _read_pool(field: Field, name: str, kinds: Collection[str] | None, outside: Outside) -> PoolSpec:
    section = field.section(pool_table(kinds))
    chosen = section.get("kind")
    named = None
    if chosen is not None:
        named = chosen.text() if kinds is None else chosen.one_of(kinds, what="kind of backend")
    kind, known = named or "shard", chosen is None or named is not None
    read_where = (read_address if kind in AT_HOST_AND_PORT else read_url) if known else str
    read = [item.read(lambda text: _resolved(text, outside, read_where)) for item in section.items("at")]
    places = [place for found in read if found for place in found]
    key = section.get("key")
    local: int = section.read("local", 0)
    check_option = partial(outside.check_option, kind, local > 0) if known else None
    _check_place(field, section, kind, local)
    _check_tls(section, kind, local, places)
    return PoolSpec(
        name,
        kind=kind,
        at=tuple(place for place in places if isinstance(place, str)),
        sources=tuple(place for place in places if not isinstance(place, str)),
        register=section.read("register", False),
        local=min(local, _MOST_LOCAL),
        model=section.read_any("model") or (BUNDLED if local else None),
        models=_read_names(section.get("models")),
        key=key.read(outside.secret) if key else None,
        options=_read_options(section.get("options"), check_option),
        tokenizer=_read_tokenizer(section.get("tokenizer"), outside),
        chat_template=_read_template(section.get("chat_template"), outside),
        health=_read_health(section.section("health"), timeouts_of(kind)),
        tls=read_client(section.get("tls")),
        prefill=section.read_any("prefill"),
        wake=_read_wake(section.get("wake"), outside),
    )


def _read_wake(field: Field | None, outside: Outside) -> Wake | None:
    if field is None:
        return None
    section = field.section(WAKE)
    within_s, given, signing = section.read_any("within"), section.get("url"), section.get("secret")
    command = section.texts("command")
    if given is not None and command:
        section.entries["command"].complain("a pool is started by a URL or by a command, not both (drop one)")
    if signing is not None and given is None:
        signing.complain("signs nothing without a url")
    url = None if given is None else given.read(lambda text: read_webhook(text, outside))
    secret = None if signing is None else signing.read(outside.secret)
    return None if within_s is None else Wake(within_s, url, secret, command)


def _resolved(text: str, outside: Outside, reader: Callable[[str], str]) -> tuple[str | SourceName, ...]:
    """The address in `text`, or those that it refers to: an outside value may be several, separated by commas."""

    def place(address: str) -> str | SourceName:
        return read_source(address) if is_source(address) else reader(address)

    def absent(name: str) -> tuple[str | SourceName, ...]:
        # an address of either form; a pool of kinds with URLs may have TLS
        return (place(f"{name}:1" if reader is read_address else f"https://{name}"),)

    value = outside.resolve(text, absent)
    if value == text:
        return (place(text),)
    try:
        return tuple(place(part.strip()) for part in value.split(","))
    except ValueError:
        # the value of a reference may be a secret that was named by mistake
        raise ValueError(f"the value of {text} is not an address") from None


def _check_place(field: Field, section: Section, kind: str, local: int) -> None:
    at = section.get("at")
    if local and kind != "shard":
        section.entries["local"].complain(f"only shards are started locally, and this pool is of kind {kind}")
    elif local and at:
        section.entries["local"].complain("a pool has local shards or addresses (at), not both; make two pools of it")
    elif local > _MOST_LOCAL:
        section.entries["local"].complain(f"at most {_MOST_LOCAL} shards are started on one machine")
    elif not local and kind != "fake" and at is None and "register" not in section:
        field.complain("has no backends (write at: with addresses, or local: with a number of shards)")


def _check_tls(section: Section, kind: str, local: int, places: Collection[str | SourceName]) -> None:
    field = section.get("tls")
    if field is None:
        return
    if local or kind == "fake":
        field.complain("is for backends on other machines, and these are inside this one")
    plain = [place for place in places if isinstance(place, str) and place.startswith("http://")]
    if plain:
        field.complain(f"is not used at {plain[0]} (write https://)")


def _read_health(section: Section, timeouts: Timeouts) -> HealthRules:
    usual = HealthRules()
    return replace(
        usual,
        failures=section.read("failures", usual.failures),
        failure_share=section.read("failure_share", usual.failure_share),
        probe_every_s=section.read("probe_every", usual.probe_every_s),
        probe_timeout_s=section.read("probe_timeout", usual.probe_timeout_s),
        suspect_s=section.read("suspect_after", usual.suspect_s),
        timeouts=Timeouts(
            section.read("first_byte", timeouts.first_byte),
            section.read("first_token", timeouts.first_token),
            section.read("between_tokens", timeouts.between_tokens),
        ),
        retry_s=section.read("retry", usual.retry_s),
        slow_start_s=section.read("slow_start", usual.slow_start_s),
    )


def _read_names(field: Field | None) -> dict[str, str]:
    found = {name: entry.text() for name, entry in (field.entries() if field else {}).items()}
    return {name: text for name, text in found.items() if text}


def _read_tokenizer(field: Field | None, outside: Outside) -> str | None:
    name = field.read(outside.resolve) if field else None
    if field is None or name is None or name == NO_TOKENIZER:
        return name
    try:
        doubt = outside.doubt_tokenizer(name)
    except ValueError as error:
        field.complain(str(error))
        return None
    if doubt is not None:
        field.doubt(doubt)
    return name


def _read_template(field: Field | None, outside: Outside) -> str | None:
    def checked(text: str) -> str:
        path = outside.resolve(text)
        outside.check_template(path)
        return path

    return field.read(checked) if field else None


def _read_options(field: Field | None, check: Callable[[str, Option], None] | None) -> dict[str, Option]:
    """The options by name; without a `check`, for a kind that is not known, as they stand there."""
    options: dict[str, Option] = {}
    for name, entry in (field.entries() if field else {}).items():
        options[name] = entry.texts() if isinstance(entry.node.value, list) else entry.text() or ""
        if check is not None and entry.is_sound():
            try:
                check(name, options[name])
            except ValueError as error:
                entry.complain(str(error))
    return options


_TRANSFERS = frozenset({"sglang", "shard", "tensorrt_llm", "vllm"})
"""Kinds with backends that can fetch KV from one another."""


def _check_prefill(fields: Mapping[str, Field], pools: Mapping[str, PoolSpec]) -> None:
    for name, pool in pools.items():
        if pool.prefill is None:
            continue
        field, other = fields[name].find("prefill"), pools.get(pool.prefill)
        if pool.kind not in _TRANSFERS:
            field.complain(f"backends of kind {pool.kind} fetch no KV; only these do: {', '.join(sorted(_TRANSFERS))}")
        elif other is None:
            field.complain(
                f"no pool is called {quoted(pool.prefill)} ({did_you_mean(pool.prefill, pools) or 'add it'})"
            )
        elif other is pool or other.prefill is not None:
            field.complain("a pool that computes prompts for others gives no answers and has no prefill (name another)")
        elif other.kind != pool.kind:
            field.complain(f"KV goes between backends of one kind, and {pool.prefill} has {other.kind}")


def _refuse_repeated_addresses(fields: Mapping[str, Field], pools: Mapping[str, PoolSpec]) -> None:
    seen: set[str] = set()
    for name, pool in pools.items():
        for address in (*pool.at, *map(str, pool.sources)):
            if address in seen:
                fields[name].complain(f"{quoted(address)} is here twice; a backend belongs to one pool")
            seen.add(address)
