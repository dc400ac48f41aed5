"""References to values outside the file, and what happens to those that are not there."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.sla.parse import Parsed, examine, parse
from policies.sla.secrets import Outside

FILE = """
tenants:
  acme: {keys: ["${env:ACME_KEY}", "${file:/run/acme}"]}
  labs: {keys: [{key: "${env:LABS_KEY}", limits: {concurrent: 2}}]}
pools:
  own: {kind: shard, at: ["${env:SHARDS}"], tokenizer: "${env:TOKENIZER}"}
  vllm: {kind: vllm, at: ["${env:VLLMS}"], key: "${env:VLLM_KEY}", tls: {ca: /ca}}
  more: {kind: vllm, at: ["${env:MORE}"]}
server: {admin_keys: ["${env:ADMIN_KEY}"]}
store: {redis: "${env:REDIS}", quotas: ["${env:FIRST}", "${env:SECOND}"], tls: {ca: /ca}}
"""
REFERENCES = FILE.count("${")


def no_file(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


def read(text: str, *, may_be_absent: bool = True, **environment: str) -> Parsed:
    outside = Outside(environment, no_file, may_be_absent=may_be_absent)
    return examine(text, source="sla.yaml", outside=outside)


def test_every_value_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        read(FILE, may_be_absent=False)
    assert sum("not set" in line or "cannot read" in line for line in caught.value.problems) == REFERENCES


def test_every_value_may_be_absent_and_is_listed_with_its_line() -> None:
    parsed = read(FILE)
    assert len(parsed.unchecked) == REFERENCES
    assert parsed.unchecked[0] == "sla.yaml:3: tenants.acme.keys[0]: the environment variable ACME_KEY is not set"
    assert parsed.unchecked[1].startswith("sla.yaml:3: tenants.acme.keys[1]: cannot read /run/acme")


def test_an_empty_value_counts_as_absent() -> None:
    # services of CI give forks empty secrets
    one = 'tenants: {a: {keys: ["${env:KEY}"]}}'
    assert read(one, KEY=" ").unchecked == ("sla.yaml:1: tenants.a.keys[0]: ${env:KEY} is empty",)
    with pytest.raises(ConfigError, match="is empty"):
        read(one, may_be_absent=False, KEY=" ")


def test_a_value_that_is_there_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"pools\.own\.at\[0\]: the value of \$\{env:SHARDS\} is not an address"):
        read(FILE, SHARDS="http://a")
    assert len(read(FILE, ACME_KEY="a", SHARDS="a:1").unchecked) == REFERENCES - 2


def test_what_does_not_depend_on_values_is_proved_without_them() -> None:
    with pytest.raises(ConfigError, match="has a key that 'a' has too"):
        read('tenants: {a: {keys: ["${env:KEY}"]}, b: {keys: ["${env:KEY}"]}}')
    with pytest.raises(ConfigError, match="there is no 'clases' here"):
        read(FILE + "clases: {}")


def test_a_reference_that_is_none_stays_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"must be a whole \$\{env:NAME\}"):
        read('tenants: {a: {keys: ["x${env:KEY}"]}}')
    with pytest.raises(ConfigError, match="a secret must not stand in the file"):
        read("pools: {p: {kind: vllm, at: ['http://a'], key: plain}}")


def test_secrets_for_other_programs_are_known_and_words_are_none() -> None:
    outside = {
        "KEY": "sk-of-the-pool",
        "WORD": "redis",
        "REDIS": "redis://:pass%2Fword-1@127.0.0.1:6379/0",
        "QUOTAS": "redis://127.0.0.1:6380/0?password=pass-word-2",
        "USAGE": "postgresql://me:pass-word-3@db/usage",
        "HOOK": "https://hooks.example.com/services/T0/secret",
        "SIGN": "signing-secret",
    }
    config = parse(
        """
pools:
  own: {kind: openai_compatible, model: m, at: "http://127.0.0.1:1", key: "${env:KEY}"}
  other: {kind: openai_compatible, model: n, at: "http://127.0.0.1:2", key: "${env:WORD}"}
store: {redis: "${env:REDIS}", quotas: ["${env:QUOTAS}"]}
usage: {store: "${env:USAGE}", journal: usage.journal}
alerts: {webhook: "${env:HOOK}", secret: "${env:SIGN}"}
""",
        environment=outside,
    )
    assert config.secrets == {
        *("sk-of-the-pool", "pass%2Fword-1", "pass/word-1", "pass-word-2", "pass-word-3"),
        *(outside["HOOK"], "signing-secret"),
    }
    assert "pass-word" not in repr(config)
