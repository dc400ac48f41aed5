"""`pointsman init`, as its users call it: the file is sound, and keys are shown once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from policies.errors import ExpectedError
from policies.keys import hash_of
from policies.sla.parse import parse
from router.start.cli import app
from router.start.commands import init as commands
from router.start.commands.init import Wishes
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer


def init(*options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["init", *options])
    if isinstance(done.exception, ExpectedError):
        return 1, "", str(done.exception)
    return done.exit_code, done.stdout, done.stderr


def test_tenants_get_keys_that_the_file_has_as_hashes(tmp_path: Path) -> None:
    file = tmp_path / "sla.yaml"
    wishes = ("--tenant", "shop", "--tenant", "ads", "--ttft", "800ms", "--budget", "20 USD")
    code, _, told = init(str(file), *wishes)
    assert code == 0
    config = parse(file.read_text())
    shown = {line.split()[2].rstrip(","): line.split()[-1] for line in told.splitlines() if line.startswith("key of")}
    assert {name: frozenset([hash_of(key)]) for name, key in shown.items()} == {
        name: tenant.key_hashes for name, tenant in config.tenants.items()
    }
    assert [tenant.limits.cost_per_month for tenant in config.tenants.values()] == [20_000_000] * 2
    assert config.classes["interactive"].ttft_s == 0.8
    assert not any(key in file.read_text() for key in shown.values())
    assert CliRunner().invoke(app, ["check", str(file)]).exit_code == 0


def test_without_options_and_terminal_it_is_the_smallest_file() -> None:
    code, text, _ = init("-")
    assert code == 0
    assert parse(text).anonymous is not None


async def test_engines_are_asked_which_kind_they_are() -> None:
    async with running(VLLMServer()) as server:
        code, text, told = await asyncio.to_thread(init, "-", "--to", server.url)
    assert code == 0
    assert "is vllm, by its" in told
    (pool,) = parse(text).pools.values()
    assert (pool.kind, pool.at) == ("vllm", (server.url,))


def test_a_person_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["", "shop ads", "", "20 USD"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert commands.asked() == Wishes([], ["shop", "ads"], None, "20 USD")


@pytest.mark.parametrize("name", ["null", "NULL", "true", "1", "1.5", "2026-11-26"])
def test_names_that_yaml_takes_for_something_else_are_in_quotes(name: str) -> None:
    code, text, _ = init("-", "--tenant", name)
    assert code == 0
    assert list(parse(text).tenants) == [name]
    assert list(yaml.safe_load(text)["tenants"]) == [name]


def test_without_an_engine_the_file_says_what_to_replace() -> None:
    assert "# No engine was named: replace the kind and the address" in init("-", "--tenant", "shop")[1]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--tenant", "unknown"), "'unknown' stands for requests without a valid key"),
        (("--tenant", "a b"), "'a b' is no name of a tenant"),
        (("--ttft", "fast"), "--ttft must be a duration"),
        (("--budget", "20"), "--budget has no currency"),
        (("--budget", "much"), "--budget must be"),
        (("--to", "http://127.0.0.1:1"), "nothing answers at"),
        (("--from-litellm", "/no/such/file"), "cannot be read"),
    ],
)
def test_wishes_that_cannot_be_are_refused(options: tuple[str, ...], wrong: str) -> None:
    code, _, told = init("-", *options)
    assert code == 1
    assert wrong in told


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "sla.yaml"
    file.write_text("mine")
    code, _, told = init(str(file))
    assert (code, file.read_text()) == (1, "mine")
    assert "is there already" in told
    # before anything else: no engine is asked, and no key is made
    assert "is there already" in init(str(file), "--to", "http://127.0.0.1:1")[2]
    assert "cannot be written" in init(str(tmp_path / "no" / "folder"))[2]


def test_the_next_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote sla.yaml; next: pointsman serve sla.yaml\n" in init("--tenant", "shop")[2]
    config = tmp_path / "config.yaml"
    engine = "{model: hosted_vllm/x, api_base: http://a:1, api_key: os.environ/K}"
    config.write_text(f"model_list: [{{model_name: m, litellm_params: {engine}}}]")
    told = init("from-litellm.yaml", "--from-litellm", str(config))[2]
    # a reference to a secret is left in it
    assert "next: pointsman check from-litellm.yaml --without-secrets\n" in told


def test_litellms_files_are_read_and_what_is_none_is_refused(tmp_path: Path) -> None:
    config, keys = tmp_path / "config.yaml", tmp_path / "keys.json"
    config.write_text("model_list: [{model_name: m, litellm_params: {model: hosted_vllm/x, api_base: http://a:1}}]")
    keys.write_text('{"keys": [{"token": "%s"}]}' % ("a" * 64))
    code, text, _ = init("-", "--from-litellm", str(config), "--litellm-keys", str(keys))
    assert code == 0
    assert parse(text).tenant_by_key_hash.keys() == {"a" * 64}
    keys.write_text('{"keys": ["a"]}')
    assert "is no list of keys" in init("-", "--from-litellm", str(config), "--litellm-keys", str(keys))[2]
    keys.write_text("{")
    assert "cannot be read" in init("-", "--from-litellm", str(config), "--litellm-teams", str(keys))[2]
    config.write_text("- a")
    assert "is no config.yaml of LiteLLM" in init("-", "--from-litellm", str(config))[2]
    config.write_text("a: [")
    assert "cannot be read" in init("-", "--from-litellm", str(config))[2]
