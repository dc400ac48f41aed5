"""Engines that already run: which kind each is, and the SLA file of a router in front of them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.errors import ConfigError
from policies.sla.pools import read_url
from router.direct import client_context, direct_opener
from tls.errors import why_unanswered
from tls.settings import TlsSettings

KEY_VARIABLE = "POINTSMAN_ENGINE_KEY"
"""The environment variable with the engines' own API key."""

_MODELS = "/v1/models"
_TIMEOUT_S = 5.0
_MOST_BYTES = 4 << 20

_OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt_llm",
    "lmdeploy": "lmdeploy",
    "llamacpp": "llama_cpp",
    "tabbyapi": "tabby",
    "mlc-llm": "mlc",
}
"""`owned_by` of a list of models, in lower case -> the kind of engine that writes it."""

_SIGNS = (
    ("ollama", "/api/version", b'"version"'),
    ("tgi", "/info", b'"model_id"'),
    ("llama_cpp", "/props", b'"default_generation_settings"'),
    ("vllm", "/metrics", b"vllm:"),
    ("sglang", "/metrics", b"sglang:"),
    ("sglang", "/server_info", b'"model_path"'),
)
"""(kind, path, bytes that its reply has). For engines that the list of models does not identify."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine at `url` that answers. `sign` is the path that shows its `kind`; None: it only speaks OpenAI's API.

    `models` are the names in its list of models; empty if it has none.
    """

    url: str
    kind: str
    sign: str | None
    models: tuple[str, ...] = ()

    def __str__(self) -> str:
        serves = f" and serves {', '.join(self.models[:5])}" if self.models else ""
        if self.sign is None:
            return f"{self.url} speaks OpenAI's API{serves}; nothing shows which engine it is"
        return f"{self.url} is {self.kind}, by its {self.sign}{serves}"


def find_engine(address: str, key: str | None = None, ca: str | None = None) -> Engine:
    """The engine at `address`, an http or https URL, asked with its API `key`; `ca` is the file of its authorities.

    Raises ConfigError if the address is none, if nothing answers there within 5 s, if the key is missing or wrong, or
    if the answers are those of no known engine.
    """
    try:
        url = read_url(address).removesuffix("/v1")
    except ValueError as error:
        raise ConfigError(f"--to {address}: {error}", hint="write the engine's own address") from error
    opener = direct_opener(client_context(TlsSettings(ca=ca)))
    status, body = _get(opener, url, _MODELS, key)
    if status in (401, 403):
        hint = f"set {KEY_VARIABLE} to its key"
        raise ConfigError(f"{url} wants {'another' if key else 'an'} API key", hint=hint)
    cards = _cards(body) if status == 200 else None
    models = tuple(str(card["id"]) for card in cards or () if "id" in card)
    for card in cards or ():
        if kind := _OWNERS.get(str(card.get("owned_by")).lower()):
            return Engine(url, kind, _MODELS, models)
    for kind, path, mark in _SIGNS:
        found, page = _get(opener, url, path, key)
        if found == 200 and mark in page:
            return Engine(url, kind, path, models)
    if cards is None:
        hint = "check the address, or write a file with the pool's `kind:`, see docs/backends.md"
        raise ConfigError(f"{url} answers, but as no engine that the router knows: {_MODELS} gave {status}", hint=hint)
    return Engine(url, "openai_compatible", None, models)


def file_for(engines: Sequence[Engine], *, has_key: bool, ca: str | None = None) -> str:
    """The SLA file of a router in front of `engines`: one pool for each kind."""
    key = f', key: "${{env:{KEY_VARIABLE}}}"' if has_key else ""
    urls: dict[str, list[str]] = {}
    for engine in dict.fromkeys(engines):
        urls.setdefault(engine.kind, []).append(f'"{engine.url}"')
    tls = f", tls: {{ca: {json.dumps(ca)}}}" if ca else ""
    lines = (f"  {kind}: {{kind: {kind}, at: [{', '.join(at)}]{key}{tls}}}" for kind, at in urls.items())
    return "\n".join(("pools:", *lines, ""))


def _get(opener: urllib.request.OpenerDirector, url: str, path: str, key: str | None) -> tuple[int, bytes]:
    """Status and body of `path`. Raises ConfigError if nothing answers."""
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310 - read_url has checked the scheme
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as reply:
            return reply.status, reply.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason, hint = why_unanswered(url, error)
        hint = hint or "start the engine first, or check the address"
        raise ConfigError(f"nothing answers at {url}: {reason}", hint=hint) from error


def _cards(body: bytes) -> list[dict[str, Any]] | None:
    """The entries of a list of models in OpenAI's form; None if `body` is no such list."""
    try:
        listed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    data = listed.get("data") if isinstance(listed, dict) else None
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else None
