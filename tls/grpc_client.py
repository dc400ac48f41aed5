"""Channels of gRPC clients with TLS. Our own handshake comes first: gRPC has no pins, and its reasons are vague."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from typing import Any

import grpc

from tls.certificates import Certificates
from tls.errors import TlsError, reason_of

DIRECT = (("grpc.enable_http_proxy", 0),)
"""Options of every channel: gRPC would go through the proxy that `grpc_proxy`, `https_proxy` or `http_proxy` name."""

_HELLO_S = 5.0

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How a client of HTTP/2 begins, with empty settings. Source: RFC 9113, 3.4."""


async def open_channel(
    address: str, certificates: Certificates | None, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """A channel to `address` (host:port), with TLS if there are `certificates`. Raises TlsError if the server is not
    to be trusted, does not trust us, or cannot be reached.
    """
    options = (*DIRECT, *options)
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    settings = certificates.settings
    leaf = await _greet(address, certificates)
    # gRPC knows no pins, and not the system's authorities: then it trusts the certificate alone that was just verified
    is_own = settings.pins or settings.ca is None
    trusted = ssl.DER_cert_to_PEM_cert(leaf).encode() if is_own else certificates.pem(settings.ca)
    credentials = grpc.ssl_channel_credentials(trusted, certificates.pem(settings.key), certificates.pem(settings.cert))
    if settings.name is not None:
        options = (*options, ("grpc.ssl_target_name_override", settings.name))
    return grpc.aio.secure_channel(address, credentials, options=options)


async def _greet(address: str, certificates: Certificates) -> bytes:
    """The certificate (DER) of the server at `address`, when it has accepted ours."""
    host, _, port = address.rpartition(":")
    writer = None
    try:
        async with asyncio.timeout(_HELLO_S):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=certificates.context(), server_hostname=certificates.settings.name
            )
            # in TLS 1.3 the server looks at our certificate when the handshake is over for us
            writer.write(_PREFACE)
            if not await reader.read(1):
                raise ConnectionResetError
        leaf = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError, TimeoutError) as error:
        failure = TlsError(*reason_of(error))
        certificates.refusals.refuse(address, failure)
        raise failure from error
    except OSError as error:
        raise TlsError(os.strerror(error.errno).lower() if error.errno else str(error)) from error
    finally:
        if writer is not None:
            writer.transport.abort()
    assert isinstance(leaf, bytes)
    return leaf
