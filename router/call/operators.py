"""From a key or token to an operator and its role."""

from __future__ import annotations

from policies.errors import NoCredential, PermissionDenied, Unassigned, Unauthenticated
from policies.identity import role_of
from policies.keys import hash_of, id_of
from policies.roles import Operator, OperatorRole
from policies.sla.config import Config
from router.call.identify import Identities
from router.identity.errors import KeysAway, UnknownKey

THIS_MACHINE = Operator("this machine", OperatorRole.OWNER, "no key")
"""The operator of a port that asks for neither keys nor tokens, and so is open to this machine alone."""

_HINT = "send the header 'Authorization: Bearer ADMIN_KEY'"


def asks_for_keys(config: Config) -> bool:
    """Whether an operator must show a key or a token."""
    return bool(config.server.admin_key_hashes) or (config.identity is not None and config.identity.gives_roles)


async def operator_of(key: str | None, config: Config, identities: Identities) -> Operator:
    """The operator with this key or token, where the file asks for one.

    Raises Unauthenticated; Unassigned for a token that no rule gives a role; Unavailable while it cannot be verified.
    """
    try:
        return _operator(key, config, identities)
    except (UnknownKey, KeysAway) as missing:
        if not await missing.issuer.refreshed():
            raise
    return _operator(key, config, identities)


def require_role(operator: Operator, role: OperatorRole) -> None:
    """Raise PermissionDenied unless `operator` has `role`, or one above it."""
    if operator.role < role:
        raise PermissionDenied(f"this needs the role {role}", hint=f"your role is {operator.role}")


def _operator(key: str | None, config: Config, identities: Identities) -> Operator:
    if not key:
        raise NoCredential("this needs an admin key", hint=_HINT)
    server, digest = config.server, hash_of(key)
    if digest in server.admin_key_hashes:
        return server.operators.get(digest) or Operator(id_of(digest))
    verified = None if identities.tokens is None else identities.tokens.find(key, digest)
    if verified is None:
        raise Unauthenticated("the admin key is not known", hint=_HINT)
    identity = config.identity
    role = None if identity is None else role_of(identity.rules, verified.issuer, verified.claims)
    if role is None:
        raise Unassigned("no rule of this router gives the token a role", hint="ask an owner of this router")
    return Operator(f"{verified.issuer}:{verified.claims.get('sub', '')}"[:200], role, "token")
