"""The public key of a certificate, and its pin."""

import hashlib
import subprocess

import pytest

from tests.tls.authority import Authority, der_of
from tls.der import pin_of


def test_a_pin_is_the_digest_that_openssl_computes_of_the_public_key(authority: Authority) -> None:
    issued = authority.issue("pinned")
    command = f"openssl x509 -in {issued.cert} -pubkey -noout | openssl pkey -pubin -outform der"
    key = subprocess.run(["sh", "-c", command], check=True, capture_output=True).stdout
    assert pin_of(der_of(issued.cert)) == hashlib.sha256(key).hexdigest()


def test_a_renewed_certificate_with_the_same_key_keeps_its_pin(authority: Authority) -> None:
    other = authority.issue("other")
    assert authority.issue("pinned").pin != other.pin
    assert pin_of(der_of(other.cert)) == other.pin


def test_what_is_cut_off_or_no_certificate_is_refused(authority: Authority) -> None:
    der = der_of(authority.cert)
    for cut in range(0, len(der) - 1, 7):
        with pytest.raises(ValueError, match="certificate"):
            pin_of(der[:cut])
    with pytest.raises(ValueError, match="certificate"):
        pin_of(b"not a certificate, but rather long text" * 9)
