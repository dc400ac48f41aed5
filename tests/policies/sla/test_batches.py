"""The section `batches`."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.sla.batches import BatchSettings, S3Settings
from policies.sla.changes import fixed_changes
from policies.sla.parse import parse


def test_without_the_section_there_are_none() -> None:
    assert parse("").batches is None


def test_a_folder_is_enough() -> None:
    assert parse("batches: {store: /var/batches}").batches == BatchSettings("/var/batches", "standard")


def test_a_job_has_as_long_as_the_deadline_of_the_last_class() -> None:
    settings = parse("classes: {chat: {}, night: {deadline: 6h}}\nbatches: {store: b, class: night}").batches
    assert settings is not None
    assert (settings.service_class, settings.window_s) == ("night", 6 * 3600.0)


def test_limits_are_read() -> None:
    text = (
        "batches: {store: b, keep: 7d, max_file: 1MiB, max_lines: 5k, max_jobs: 3, max_storage: 1GiB, "
        "concurrent: 12, slowdown: 2%}"
    )
    expected = BatchSettings("b", "standard", 86_400.0, 7 * 86_400.0, 2**20, 5000, 3, 2**30, 12, 0.02)
    assert parse(text).batches == expected


def test_a_bucket_has_an_endpoint_and_credentials() -> None:
    text = """
    batches:
      store: s3://bucket/some/prefix/
      s3: {endpoint: "https://s3.example.com", region: r, scratch: /s, access_key: "${env:A}", secret_key: "${env:K}"}
    """
    settings = parse(text, environment={"A": "access", "K": "secret"}).batches
    assert settings is not None
    assert settings.store == "s3://bucket/some/prefix"
    assert settings.s3 == S3Settings("/s", "https://s3.example.com", "r", "access", "secret")


def test_a_bucket_alone_is_amazons_with_the_credentials_of_the_environment() -> None:
    settings = parse("batches: {store: 's3://bucket'}").batches
    assert settings is not None
    assert settings.s3 is not None
    assert (settings.s3.endpoint, settings.s3.access_key) == (None, None)
    assert settings.s3.scratch is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("batches: {}", "store"),
        ("batches: {store: 'ftp://host/b'}", "must be a folder or s3://bucket/prefix, not 'ftp'://..."),
        ("batches: {store: 's3://B'}", "with a bucket of 3 to 63 small letters"),
        ("batches: {store: b, s3: {region: x}}", "is for a store s3://bucket/prefix, and this one is a folder"),
        ("batches: {store: 's3://bucket', s3: {endpoint: minio}}", "must be a URL such as https://s3.example.com"),
        ("batches: {store: 's3://bucket', s3: {secret_key: abc}}", "a secret must not stand in the file"),
        ("batches: {store: 's3://bucket', s3: {secret_key: '${env:K}'}}", "needs access_key and secret_key"),
        ("batches: {store: b, keep: 5m}", "must be 1h at least, so that results can be fetched"),
        ("batches: {store: b, max_line: 5}", "there is no 'max_line' here (did you mean 'max_lines'?)"),
        ("batches: {store: b, class: nihgt}\nclasses: {chat: {}, night: {}}", "there is no class 'nihgt'"),
        ("batches: {store: b, class: chat}\nclasses: {chat: {}, night: {}}", "must be 'night', the last class"),
        ("batches: {store: b, slowdown: 120%}", "must be a share of at most 100%"),
    ],
)
def test_a_mistake_is_named(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, environment={"K": "key"})
    assert any(wrong in line for line in caught.value.problems), caught.value.problems


def test_its_folder_cannot_change_while_the_router_runs_and_its_limits_can() -> None:
    before, text = parse("batches: {store: a}"), "batches: {store: b}"
    [line] = fixed_changes(before, parse(text), text=text, source="sla.yaml")
    assert "restart to keep batches elsewhere" in line
    text = "batches: {store: a, concurrent: 3}"
    assert fixed_changes(before, parse(text), text=text, source="sla.yaml") == ()
