"""The certificates of one side of TLS: read from files, and read again when these change."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tls.der import pin_of
from tls.errors import TlsError, UnpinnedError
from tls.refusals import Refusals
from tls.settings import TlsSettings

LOOK_EVERY_S = 1.0
"""The files are compared with those in use at most this often, when a connection is made."""

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
"""Ciphers of TLS 1.2: forward secret and authenticated ones alone. Those of TLS 1.3 all are."""

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

_log = logging.getLogger("pointsman.tls")

Stamps = tuple[tuple[int, int, int] | None, ...]
"""Of each file the time of its last change in ns, its size, and its inode; None for one that is missing."""


class _Context(ssl.SSLContext):
    """A context that checks the pins of the other side at the end of each handshake."""

    pins: frozenset[str] = frozenset()


class _PinnedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        assert isinstance(self.context, _Context)
        require_pinned(self.getpeercert(binary_form=True), self.context.pins)


def require_pinned(certificate: bytes | None, pins: frozenset[str]) -> None:
    """Raise UnpinnedError if there are `pins` and the key of `certificate` (DER) is none of them."""
    if pins and (pin := pin_of(certificate) if certificate else "") not in pins:
        raise UnpinnedError(1, f"its key sha256:{pin} is not pinned")


class Certificates:
    """What one side shows and accepts. `what` names it in messages, `alpn` are the protocols inside, best first.

    `context` reads files that changed, and keeps the old ones if the new ones cannot be used; it follows symbolic
    links, as Kubernetes swaps them. Raises TlsError if they cannot be used at first. `refusals` logs
    peers without a common ground, `on_refused` gets each reason. `clock` is in seconds.
    """

    def __init__(
        self,
        settings: TlsSettings,
        *,
        is_server: bool,
        what: str,
        alpn: tuple[str, ...] = (),
        on_refused: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.what = settings, what
        self.refusals = Refusals(what, on_refused=on_refused, clock=clock)
        self._is_server, self._alpn, self._clock = is_server, alpn, clock
        self._stamps = self._stamps_now()
        self._looked_at = clock()
        self._context = self._read()

    def __repr__(self) -> str:
        return f"<Certificates of {self.what}>"

    def context(self) -> ssl.SSLContext:
        """The context for a connection that begins now."""
        if (now := self._clock()) - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._context

    def live(self) -> ssl.SSLContext:
        """A context for clients of asyncio that is `context()` anew for each connection."""
        return _Live(self)

    def pem(self, which: str | None) -> bytes | None:
        """The content of a file of the settings; None for None. Raises TlsError."""
        if which is None:
            return None
        try:
            return Path(which).read_bytes()
        except OSError as error:
            raise self._unusable(f"cannot read {which}: {error.strerror or error}") from error

    def _look(self) -> None:
        stamps = self._stamps_now()
        if stamps == self._stamps:
            return
        # noted before the files are read: if they change meanwhile, the next look differs again
        self._stamps = stamps
        try:
            self._context = self._read()
        except TlsError as error:
            _log.warning("the certificates of %s changed and the old ones stay in use: %s", self.what, error)
        else:
            _log.info("the certificates of %s were read again", self.what)

    def _stamps_now(self) -> Stamps:
        return tuple(_stamp(file) for file in (self.settings.cert, self.settings.key, self.settings.ca) if file)

    def _read(self) -> ssl.SSLContext:
        settings = self.settings
        context = _Context(ssl.PROTOCOL_TLS_SERVER if self._is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = _VERSIONS[settings.min_version]
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        if self._alpn:
            context.set_alpn_protocols(list(self._alpn))
        self._load_own(context)
        self._load_trusted(context)
        if settings.pins:
            context.pins, context.sslobject_class = settings.pins, _PinnedObject
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        cert, key = self.settings.cert, self.settings.key
        if cert is None or key is None:
            if self._is_server or cert != key:
                raise self._unusable(f"there is no {'cert' if cert is None else 'key'}", "cert and key belong together")
            return
        self.pem(cert), self.pem(key)
        try:
            context.load_cert_chain(cert, key, password=_refuse_password)
        except ValueError as error:
            raise self._unusable(f"the key {key} has a passphrase", "write it without one") from error
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise self._unusable(f"the key {key} is not the key of {cert}", "take both from one pair") from error
            if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
                raise self._unusable(f"the certificate {cert} is too weak", "take EC, or RSA of 2048 bits") from error
            message = f"{cert} or {key} is not a certificate or key in PEM"
            raise self._unusable(message, "the first has certificates, the leaf first, the second a key") from error

    def _load_trusted(self, context: ssl.SSLContext) -> None:
        trusted = self.settings.ca
        if trusted is None:
            if not self._is_server:
                context.load_default_certs(ssl.Purpose.SERVER_AUTH)
            elif self.settings.pins:
                raise self._unusable("there are pins and no client_ca", "pins are for clients with a certificate")
            return
        self.pem(trusted)
        try:
            context.load_verify_locations(cafile=trusted)
        except ssl.SSLError as error:
            raise self._unusable(f"{trusted} has no certificate in PEM", "it has those of the CA") from error
        if self._is_server:
            context.verify_mode = ssl.CERT_REQUIRED
            # a session that is resumed would outlive its certificate
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0

    def _unusable(self, message: str, hint: str = "") -> TlsError:
        return TlsError(f"TLS of {self.what}: {message}", hint)


class _Live(ssl.SSLContext):
    """Passes each connection on to the context that the certificates have then."""

    _certificates: Certificates

    def __new__(cls, certificates: Certificates) -> _Live:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._certificates = certificates
        return made

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: Any = None,
    ) -> ssl.SSLObject:
        certificates = self._certificates
        name = certificates.settings.name or server_hostname
        return certificates.context().wrap_bio(incoming, outgoing, server_side, name, session)


def _stamp(file: str) -> tuple[int, int, int] | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _refuse_password() -> str:
    raise ValueError("keys have no passphrase here")
