"""Who asks: from the key that a call came with to its tenant."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from contextlib import suppress

from policies.config import Config
from policies.errors import Unauthenticated
from policies.nouns import Tenant


def identify(key: str | None, config: Config) -> Tenant:
    """The tenant whose key this is; the anonymous one, where the file has it, for calls without a key.

    Keys are looked up by their sha256, so the time of a lookup says nothing about keys that exist.
    Raises Unauthenticated.
    """
    if key:
        tenant = config.tenant_by_key_hash.get(hashlib.sha256(key.encode()).hexdigest())
        if tenant is not None:
            return tenant
    # without any tenant that has keys there is nobody to tell apart: clients that must send some key may
    if config.anonymous is not None and (not key or not config.tenant_by_key_hash):
        return config.anonymous
    if not key:
        raise Unauthenticated("no API key was sent", hint="send the header 'Authorization: Bearer YOUR_KEY'")
    raise Unauthenticated("the API key is not known", hint="ask the operator for a key of this router")


def on_behalf_of(name: str, config: Config) -> Tenant:
    """The tenant `name`, who was identified before, for what the router goes on doing for it.

    Raises Unauthenticated.
    """
    tenant = config.tenants.get(name)
    if tenant is None and config.anonymous is not None and config.anonymous.name == name:
        return config.anonymous
    if tenant is None:
        raise Unauthenticated(f"there is no tenant '{name}' any more", hint="the SLA file has changed")
    return tenant


def key_in(headers: Mapping[str, str]) -> str | None:
    """The key in `authorization: Bearer KEY`, else the one in `x-api-key`; names are in lower case or indifferent.

    The password of `authorization: Basic ...` is one too: that is what clients make of http://any:KEY@host.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(token, validate=True).decode().partition(":")[2] or None
    return headers.get("x-api-key") or None
