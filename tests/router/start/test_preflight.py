"""Obstacles to a start are found before anything is started."""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from policies.errors import ConfigError
from policies.sla.config import Config
from policies.sla.parse import default_config, parse
from policies.sla.pools import PoolSpec
from router.start.address import Address
from router.start.preflight import doubts_at_start, require_guarded, require_startable
from shards.bundled import weights

pytestmark = pytest.mark.torch


def a_config(model: str = "bundled", **server: str | None) -> Config:
    config = default_config(local=1, model=model)
    listens = {"http": "127.0.0.1:0", "grpc": None, "admin": None, **server}
    return replace(config, server=replace(config.server, **listens))


def test_what_can_be_started_is_let_through() -> None:
    require_startable(a_config())
    require_startable(a_config(str(weights()), grpc="[::1]:0", admin="127.0.0.1:0", picker="127.0.0.1:0"))


@pytest.mark.parametrize("door", ["http", "grpc", "admin", "picker"])
def test_an_address_that_is_taken_is_named(door: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot listen on {taken}: address already in use \(is another router"):
            require_startable(a_config(**{door: taken}))
        require_startable(a_config(**{door: taken}), shares_ports=True)


def test_two_doors_at_one_address_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = f"127.0.0.1:{other.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"cannot listen on {free}"):
        require_startable(a_config(http=free, grpc=free))


def test_an_address_that_this_machine_does_not_have_gets_another_hint() -> None:
    with pytest.raises(ConfigError, match=r"203.0.113.7:8080: .*\(this machine does not have this address"):
        require_startable(a_config(http="203.0.113.7:8080"))


def test_an_invalid_address_is_reported_before_shards_are_loaded() -> None:
    with pytest.raises(ConfigError, match="'99' is not an address"):
        require_startable(a_config(http="99"))


def test_the_error_for_a_missing_model_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"the model Qwen/Qwen3-0.6B, which is not a directory \(.*hf download"):
        require_startable(a_config("Qwen/Qwen3-0.6B"))


def test_the_error_for_a_directory_without_a_checkpoint_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which has no config.json \(a checkpoint is"):
        require_startable(a_config(str(tmp_path)))


def test_models_of_backends_elsewhere_are_none_of_its_business() -> None:
    config = a_config()
    require_startable(replace(config, pools={"lm": PoolSpec("lm", kind="vllm", at=("http://a:1",), model="no/where")}))


def test_the_error_of_shards_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"torch is not installed.*pip install 'pointsman\[shard\]'"):
        require_startable(a_config())


def test_a_public_admin_port_needs_keys() -> None:
    with pytest.raises(ConfigError, match="is open to other machines and has no keys"):
        require_startable(a_config(admin="0.0.0.0:0"))
    guarded = a_config()
    require_guarded(
        Address("0.0.0.0", 0), replace(guarded, server=replace(guarded.server, admin_key_hashes=frozenset({"x"})))
    )


KEYED = "tenants: {acme: {keys: ['${env:KEY}']}}\n"
DOUBTS = {
    "server: {tls: {cert: NO/a.crt, key: NO/a.key}}": "TLS of server.http: cannot read NO/a.crt",
    "pools: {p: {kind: vllm, at: ['https://a:1'], tls: {ca: NO/ca.crt}}}": "TLS of pool p: cannot read NO/ca.crt",
    "server: {decision_log: NO/d.jsonl}": "server.decision_log is NO/d.jsonl, and there is no folder NO",
    "server: {keys_file: NO/keys}": "server.keys_file is NO/keys, and there is no folder NO",
    "audit: {file: NO/audit.log}": "audit.file is NO/audit.log, and there is no folder NO",
    "usage: {store: NO/usage.sqlite}": "usage.store is NO/usage.sqlite, and there is no folder NO",
    "pools: {own: {kind: shard, local: 1, model: NO/model}}": "pool 'own' has the model NO/model, which is not a dir",
    "server: {http: '0.0.0.0:8080'}": "keys reach http 0.0.0.0:8080 in clear text",
    "server: {http: '127.0.0.1:8080', metrics: '127.0.0.1:8080'}": "server.http and server.metrics are both 127.0.0.1:",
}


@pytest.mark.parametrize(("text", "doubt"), DOUBTS.items())
def test_what_only_a_start_would_find_is_a_doubt_of_the_check(text: str, doubt: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    config = parse(f"{KEYED}{text.replace('NO', missing)}\n", environment={"KEY": "a-key"})
    assert any(found.startswith(doubt.replace("NO", missing)) for found in doubts_at_start(config))


def test_a_file_that_can_be_served_here_has_no_doubts() -> None:
    assert list(doubts_at_start(parse(KEYED, environment={"KEY": "a-key"}))) == []
