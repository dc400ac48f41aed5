"""Certificates of one side: what is loaded, what is refused at the start, and what a change of the files does."""

from __future__ import annotations

import logging
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tls.authority import Authority, Issued
from tests.tls.clock import Clock
from tls.certificates import LOOK_EVERY_S, Certificates
from tls.errors import TlsError
from tls.settings import TlsSettings


def a_port(settings: TlsSettings, clock: Clock | None = None) -> Certificates:
    return Certificates(settings, is_server=True, what="server.http", clock=clock or Clock())


def a_client(settings: TlsSettings) -> Certificates:
    return Certificates(settings, is_server=False, what="pool own", clock=Clock())


def shown_by(context: ssl.SSLContext) -> bytes:
    """The certificate (DER) that a server with `context` shows."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(back, there)
    server = context.wrap_bio(there, back, server_side=True)
    for side in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True) or b""


def test_a_port_allows_tls_1_2_and_1_3_with_forward_secret_authenticated_ciphers_alone(authority: Authority) -> None:
    context = a_port(authority.server(authority.issue("port"))).context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_REQUIRED
    names = [cipher["name"] for cipher in context.get_ciphers()]
    assert names
    for name in names:
        is_1_3 = name.startswith("TLS_")
        assert is_1_3 or (name.startswith("ECDHE-") and ("GCM" in name or "CHACHA20" in name)), name


def test_1_3_can_be_the_lowest_version(authority: Authority) -> None:
    settings = authority.server(authority.issue("port"), min_version="1.3")
    assert a_port(settings).context().minimum_version == ssl.TLSVersion.TLSv1_3


def test_clients_need_no_certificate_unless_there_is_a_client_ca(authority: Authority) -> None:
    settings = authority.server(authority.issue("port"), mutual=False)
    assert a_port(settings).context().verify_mode == ssl.CERT_NONE


def test_a_client_trusts_the_ca_alone_if_it_has_one_and_else_the_systems(authority: Authority) -> None:
    own = a_client(authority.client()).context()
    assert own.check_hostname
    assert own.verify_mode == ssl.CERT_REQUIRED
    assert len(own.get_ca_certs()) == 1
    usual = a_client(TlsSettings()).context()
    assert usual.check_hostname
    assert usual.verify_mode == ssl.CERT_REQUIRED


@pytest.fixture
def pair(authority: Authority, tmp_path: Path) -> Issued:
    """A pair of its own, which a test may spoil."""
    copy, issued = Issued(tmp_path / "tls.crt", tmp_path / "tls.key"), authority.issue("port")
    copy.replace_with(issued)
    return copy


def test_a_missing_file_is_named(authority: Authority, pair: Issued) -> None:
    settings = authority.server(pair)
    for spoilt, name in [(pair.key, "tls.key"), (pair.cert, "tls.crt")]:
        spoilt.unlink()
        with pytest.raises(TlsError, match=rf"^TLS of server.http: cannot read \S*{name}: No such file"):
            a_port(settings)


def test_what_is_no_certificate_is_refused(authority: Authority, pair: Issued) -> None:
    pair.cert.write_text("nonsense")
    with pytest.raises(TlsError, match="is not a certificate or key in PEM"):
        a_port(authority.server(pair))


def test_a_key_of_another_certificate_is_refused(authority: Authority, pair: Issued) -> None:
    pair.key.write_bytes(authority.issue("other").key.read_bytes())
    with pytest.raises(TlsError, match=r"the key \S*tls.key is not the key of \S*tls.crt \(take both from one pair"):
        a_port(authority.server(pair))


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(authority: Authority, pair: Issued) -> None:
    command = ["openssl", "ec", "-in", str(pair.key), "-out", str(pair.key), "-aes128", "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(TlsError, match="has a passphrase"):
        a_port(authority.server(pair))


def test_a_ca_file_without_certificates_is_refused(authority: Authority, pair: Issued) -> None:
    settings = TlsSettings(str(pair.cert), str(pair.key), str(pair.key))
    with pytest.raises(TlsError, match="has no certificate in PEM"):
        a_port(settings)


@pytest.mark.parametrize("half", ["cert", "key"])
def test_half_a_pair_is_refused_on_either_side(pair: Issued, half: str) -> None:
    settings = TlsSettings(**{half: str(getattr(pair, half))})
    for certificates in (a_port, a_client):
        with pytest.raises(TlsError, match="cert and key belong together"):
            certificates(settings)


def test_pins_without_a_client_ca_would_pin_nothing(authority: Authority, pair: Issued) -> None:
    with pytest.raises(TlsError, match="there are pins and no client_ca"):
        a_port(authority.server(pair, mutual=False, pins=frozenset({"0" * 64})))


def test_changed_files_are_read_for_the_next_connection(
    authority: Authority, pair: Issued, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pointsman.tls")
    port = a_port(authority.server(pair, mutual=False), clock)
    before = shown_by(port.context())
    pair.replace_with(authority.issue("renewed"))
    assert shown_by(port.context()) == before, "the files are looked at once a second"
    clock.now_s += LOOK_EVERY_S
    assert shown_by(port.context()) not in (before, b"")
    assert "the certificates of server.http were read again" in caplog.text


def test_files_that_stay_are_not_read_again(authority: Authority, pair: Issued, clock: Clock) -> None:
    port = a_port(authority.server(pair, mutual=False), clock)
    context = port.context()
    clock.now_s += LOOK_EVERY_S
    assert port.context() is context


def test_broken_files_are_reported_once_and_the_old_certificate_stays(
    authority: Authority, pair: Issued, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    port = a_port(authority.server(pair, mutual=False), clock)
    before, good = shown_by(port.context()), pair.cert.read_bytes()
    pair.cert.write_text("nonsense")
    for _ in range(3):
        clock.now_s += LOOK_EVERY_S
        assert shown_by(port.context()) == before
    assert caplog.text.count("the certificates of server.http changed and the old ones stay in use") == 1
    pair.cert.write_bytes(good)
    clock.now_s += LOOK_EVERY_S
    assert shown_by(port.context()) == before
    assert len(caplog.records) == 1


def test_a_pair_that_is_half_written_is_taken_when_it_is_whole(
    authority: Authority, pair: Issued, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    port = a_port(authority.server(pair, mutual=False), clock)
    before, renewed = shown_by(port.context()), authority.issue("renewed")
    pair.key.write_bytes(renewed.key.read_bytes())
    clock.now_s += LOOK_EVERY_S
    assert shown_by(port.context()) == before
    assert "is not the key of" in caplog.text
    pair.cert.write_bytes(renewed.cert.read_bytes())
    clock.now_s += LOOK_EVERY_S
    assert shown_by(port.context()) not in (before, b"")


def test_kubernetes_swaps_a_link_above_the_files(authority: Authority, tmp_path: Path, clock: Clock) -> None:
    for version in ("old", "new"):
        issued = authority.issue(version)
        (tmp_path / version).mkdir()
        Issued(tmp_path / version / "tls.crt", tmp_path / version / "tls.key").replace_with(issued)
    (tmp_path / "..data").symlink_to("old")
    mounted = Issued(tmp_path / "tls.crt", tmp_path / "tls.key")
    for file in (mounted.cert, mounted.key):
        file.symlink_to(Path("..data") / file.name)
    port = a_port(authority.server(mounted, mutual=False), clock)
    before = shown_by(port.context())
    (tmp_path / "..tmp").symlink_to("new")
    (tmp_path / "..tmp").replace(tmp_path / "..data")
    clock.now_s += LOOK_EVERY_S
    assert shown_by(port.context()) not in (before, b"")


def test_a_changed_ca_counts_too(authority: Authority, stranger: Authority, pair: Issued, clock: Clock) -> None:
    trusted = pair.cert.with_name("ca.crt")
    trusted.write_bytes(authority.cert.read_bytes())
    port = a_port(TlsSettings(str(pair.cert), str(pair.key), str(trusted)), clock)
    before = port.context().get_ca_certs()
    trusted.write_bytes(stranger.cert.read_bytes())
    clock.now_s += LOOK_EVERY_S
    assert port.context().get_ca_certs() != before
