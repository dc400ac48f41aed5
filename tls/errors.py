"""Failures of TLS in sentences: what is wrong, and what to do."""

from __future__ import annotations

import os
import re
import socket
import ssl


class TlsError(Exception):
    """Certificates that cannot be used, or a peer that cannot be trusted; `hint` is the remedy."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message, self.hint = message, hint


class UnpinnedError(ssl.SSLCertVerificationError):
    """The peer's certificate is valid, and its key is not one of the pins."""


_BY_VERIFICATION = {
    # codes of X509_V_ERR_*, in OpenSSL's x509_vfy.h
    9: ("is not valid yet", "compare the clocks of both machines"),
    10: ("has expired", "renew it; the new files are used without a restart"),
    18: ("is signed by itself", "it must be issued by the CA in the file, or be in that file"),
    19: ("is signed by a CA that is not trusted", "name the CA that issued it, as ca: in the file or as --ca"),
    20: ("is signed by a CA that is not trusted", "name the CA that issued it, as ca: in the file or as --ca"),
    21: ("is signed by a CA that is not trusted", "its file must have the whole chain, the leaf first"),
    26: ("was issued for another purpose", "its extended key usage must allow this side, as client or as server"),
    62: ("is not for this name", "its subject alternative names must have the name, or set `name`"),
    64: ("is not for this address", "its subject alternative names must have the address, or set `name`"),
}

_EXPIRED = ("the other side finds our certificate expired", "renew it; the new files are used without a restart")
_UNTRUSTED = ("the other side does not trust our certificate", "does it have the CA that issued it?")
_MISSING = ("it showed no certificate", "this port is for clients with a certificate of the CA in client_ca")
_OLD = ("it speaks no version of TLS that is allowed here", "TLS 1.2 is the oldest, or min_version")
_PLAIN = ("it speaks plain HTTP", "write https:// there")

_BY_REASON = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": _MISSING,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": (
        "the other side wants a certificate",
        "set cert: and key: in the file, or --cert and --key",
    ),
    "SSLV3_ALERT_HANDSHAKE_FAILURE": ("the other side broke off the handshake", "it may want a certificate"),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _EXPIRED,
    "TLSV1_ALERT_UNKNOWN_CA": _UNTRUSTED,
    "SSLV3_ALERT_BAD_CERTIFICATE": ("the other side rejects our certificate", "is it for this name?"),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": ("the other side rejects our certificate", "is its CA trusted there?"),
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": ("the other side rejects our certificate", "is it for this purpose?"),
    "UNSUPPORTED_PROTOCOL": _OLD,
    "TLSV1_ALERT_PROTOCOL_VERSION": _OLD,
    "NO_SHARED_CIPHER": ("it offers no cipher that is allowed here", "ECDHE with AES-GCM or ChaCha20 is"),
    "HTTP_REQUEST": _PLAIN,
    "HTTPS_PROXY_REQUEST": _PLAIN,
    "WRONG_VERSION_NUMBER": (
        "it does not speak TLS",
        "is it the port with TLS, and no PROXY protocol in front? for plain HTTP write http://",
    ),
    "UNEXPECTED_EOF_WHILE_READING": ("it hung up during the handshake", "it may not trust our certificate"),
}

_NAME = re.compile(r"\[SSL: (\w+)\]")


def reason_of(error: BaseException) -> tuple[str, str]:
    """Why a handshake failed, as seen from the side with `error`, and a hint, which may be empty."""
    if isinstance(error, TlsError):
        return error.message, error.hint
    if isinstance(error, UnpinnedError):
        return str(error.args[-1]), "add its pin, if this key is meant"
    if isinstance(error, ssl.SSLCertVerificationError):
        said = _BY_VERIFICATION.get(getattr(error, "verify_code", 0))
        return (f"its certificate {said[0]}", said[1]) if said else (f"its certificate: {error.verify_message}", "")
    if isinstance(error, ssl.SSLError):
        found = _NAME.search(str(error))
        name = getattr(error, "reason", None) or (found[1] if found else "")
        return _BY_REASON.get(name) or (name.replace("_", " ").lower() or str(error), "")
    # asyncio aborts a connection after a handshake that takes too long
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return "it did not finish the handshake in time", ""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "it hung up during the handshake", "it may not trust our certificate"
    return str(error) or type(error).__name__, ""


def why_unanswered(url: str, error: BaseException) -> tuple[str, str]:
    """Why `url` did not answer, and a hint, which may be empty.

    `error` is that of urllib, aiohttp or a socket, whatever it wraps.
    """
    found = _innermost(error)
    if isinstance(found, ssl.SSLError):
        return reason_of(found)
    if isinstance(found, TimeoutError):
        return "it was silent for too long", ""
    if isinstance(found, socket.gaierror):
        return found.strerror or str(found), ""
    if isinstance(found, OSError) and found.errno is not None and not isinstance(found, ConnectionResetError):
        return os.strerror(found.errno), ""
    if isinstance(found, ConnectionError) or type(found).__name__ in _HUNG_UP:
        return "it hung up without an answer", _IT_MAY_WANT if _is_secure(
            url
        ) else "if its port has TLS, write https://"
    return str(found) or type(found).__name__, ""


_IT_MAY_WANT = "it may want a certificate: set cert: and key: in the file, or --cert and --key"

_HUNG_UP = ("ServerDisconnectedError", "RemoteDisconnected", "BadStatusLine", "IncompleteRead")
"""Exceptions of aiohttp and http.client for connections that end before an answer."""


def _is_secure(url: str) -> bool:
    return url.startswith(("https:", "rediss:"))


def _innermost(error: BaseException) -> BaseException:
    # urllib's, aiohttp's for connections and for certificates, and the cause of any other
    for name in ("reason", "certificate_error", "os_error", "__cause__"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException):
            return _innermost(inner)
    return error


def sentence_of(error: BaseException) -> str:
    """`reason_of` as one sentence with its hint in parentheses."""
    reason, hint = reason_of(error)
    return f"{reason} ({hint})" if hint else reason
