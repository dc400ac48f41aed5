"""Puts the issuers of a file into force."""

from __future__ import annotations

from collections.abc import Callable

from policies.identity import Issuer
from policies.sla.config import Config
from router.call.gateway import Gateway
from router.operate.telemetry.telemetry import Telemetry
from router.start.tls import issuer_certificates


def trust_issuers(config: Config, gateway: Gateway, telemetry: Telemetry) -> Callable[[], None]:
    """What makes `gateway` trust the issuers of `config`, and no others. Raises ConfigError before anything changed."""
    if config.identity is None:
        return lambda: None if gateway.identities.tokens is None else gateway.identities.tokens.follow({})
    # imported late: a router that trusts no issuer starts without joserfc and cryptography
    from router.identity.issuers import Issuers
    from router.identity.key_source import KeySource
    from router.identity.tokens import Verifier

    certificates, wanted = issuer_certificates(config), config.identity.issuers

    def source_of(issuer: Issuer) -> KeySource:
        return KeySource(issuer, certificates.get(issuer.name))

    def trust() -> None:
        if gateway.identities.tokens is None:
            issuers = Issuers(clock=gateway.clock, rng=gateway.rng, on_event=telemetry.event)
            gateway.identities.tokens = Verifier(issuers, unix_time=gateway.keys.now)
        gateway.identities.tokens.follow(wanted, source_of)

    return trust
