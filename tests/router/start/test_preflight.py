"""Obstacles to a start are found before anything is started."""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from policies.errors import ConfigError
from policies.sla.config import Config
from policies.sla.parse import default_config
from policies.sla.pools import PoolSpec
from router.start.address import Address
from router.start.preflight import require_guarded, require_startable
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
