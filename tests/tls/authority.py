"""Certificates for tests, made by the openssl program: valid, expired, of a stranger."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tls.der import pin_of
from tls.settings import TlsSettings

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM files."""

    cert: Path
    key: Path

    @property
    def pin(self) -> str:
        """The sha256 in hex of the public key."""
        return pin_of(der_of(self.cert))

    def replace_with(self, other: Issued) -> None:
        """Write the files of `other` over these, the key first: for a moment they are no pair."""
        self.key.write_bytes(other.key.read_bytes())
        self.cert.write_bytes(other.cert.read_bytes())


class Authority:
    """A CA in `folder`; `cert` is its own certificate."""

    def __init__(self, folder: Path, name: str = "tests") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl")
        self._numbers = itertools.count()
        self.folder, self.cert, self._key = folder, folder / f"{name}-ca.crt", folder / f"{name}-ca.key"
        _openssl("req", "-x509", *_EC, "-days", "30", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.cert)

    def issue(self, name: str, *, days: int = 2, names: str = "DNS:localhost,IP:127.0.0.1") -> Issued:
        """A new pair for a server or a client; with negative `days` it has expired."""
        number = next(self._numbers)
        cert, key, asked = (self.folder / f"{name}-{number}.{kind}" for kind in ("crt", "key", "csr"))
        extensions = self.folder / "extensions"
        extensions.write_text(f"subjectAltName={names}\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *_EC, "-subj", f"/CN={name}", "-keyout", key, "-out", asked)
        signed = ("x509", "-req", "-in", asked, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial")
        _openssl(*signed, "-days", str(days), "-extfile", extensions, "-out", cert)
        return Issued(cert, key)

    def server(self, issued: Issued, *, mutual: bool = True, **more: object) -> TlsSettings:
        """The settings of a port that shows `issued`; if `mutual`, clients need a certificate of this CA."""
        ca = str(self.cert) if mutual else None
        return TlsSettings(str(issued.cert), str(issued.key), ca, **more)  # type: ignore[arg-type]

    def client(self, issued: Issued | None = None, **more: object) -> TlsSettings:
        """The settings of a client that trusts this CA and shows `issued`."""
        pair = (None, None) if issued is None else (str(issued.cert), str(issued.key))
        return TlsSettings(*pair, str(self.cert), **more)  # type: ignore[arg-type]


def der_of(certificate: Path) -> bytes:
    """The first certificate in the file, in DER."""
    done = subprocess.run(
        ["openssl", "x509", "-in", str(certificate), "-outform", "der"], check=True, capture_output=True
    )
    return done.stdout


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
