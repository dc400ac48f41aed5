"""The command line, as far as it starts nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from policies.errors import ConfigError, InvalidRequest
from policies.sla.config import Config
from router.start.cli import app
from router.start.commands import up
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

DEMO = str(Path(__file__).parents[3] / "examples/demo/sla.yaml")


def output_of(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_request_is_explained_in_words() -> None:
    loads = ("--cached", "own-0=60k", "--load", "own-0=8")
    done = output_of("explain", DEMO, "--tenant", "acme", "--tokens", "90000", *loads)
    assert done.exit_code == 0
    assert "90,000 tokens, 30,000 of them in no cache" in done.output
    assert "class     long-rag (rank 1)" in done.output
    assert done.output.rstrip().endswith("chosen    own-0")


def test_a_request_is_explained_as_json() -> None:
    words = ("--max-output", "1k", "--header", "X-Team=ads", "--priority", "long-rag", "--json")
    record = json.loads(output_of("explain", DEMO, "--tenant", "labs", "--tokens", "900", *words).output)
    assert (record["rule"], record["service_class"], record["max_output_tokens"]) == (2, "long-rag", 1000)
    assert record["skipped"][0]["why"] == ["tenant is labs, not acme", "prompt_tokens is 900, not at least 1,000"]


@pytest.mark.parametrize("wrong", [("--tokens", "many"), ("--tokens", "1", "--load", "own-0")])
def test_a_description_that_cannot_be_read_is_refused(wrong: tuple[str, ...]) -> None:
    assert output_of("explain", DEMO, *wrong).exit_code == 2


def test_a_name_that_the_file_does_not_have_is_an_error_for_people() -> None:
    done = output_of("explain", DEMO, "--tenant", "acm", "--tokens", "1")
    assert isinstance(done.exception, InvalidRequest)
    assert "did you mean 'acme'?" in str(done.exception)


def test_mistakes_in_a_file_are_printed_and_the_exit_status_is_one(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("clases: {}")
    done = output_of("check", str(tmp_path / "f.yaml"))
    assert done.exit_code == 1
    assert "did you mean 'classes'?" in done.output


def test_the_version_of_a_valid_file_is_printed() -> None:
    assert "is sound: 2 classes, 2 rules, 1 pool." in output_of("check", DEMO).output


def test_the_explanation_in_the_reference_is_real() -> None:
    page = (Path(__file__).parents[3] / "docs/sla.md").read_text()
    done = output_of(
        "explain", DEMO, "--tenant", "acme", "--tokens", "90k", "--cached", "own-0=60k", "--load", "own-0=8"
    )
    assert [line for line in done.output.splitlines() if line not in page] == []


def test_the_version_is_printed() -> None:
    assert output_of("--version").output.startswith("pointsman ")


def test_every_command_is_described_in_a_full_line() -> None:
    listed = output_of("--help").output.partition("Commands:")[2]
    assert listed.count("\n") >= 8
    assert "..." not in listed


def test_a_missing_file_is_reported_once() -> None:
    told = "cannot read nosuch.yaml: No such file or directory\n  `pointsman init nosuch.yaml` writes a first one\n"
    assert told in output_of("check", "nosuch.yaml").output


def test_counts_that_cannot_be_read_name_their_option() -> None:
    done = output_of("simulate", DEMO, "--trace", "day.jsonl", "--backends", "own")
    assert done.exit_code == 2
    assert "--backends: 'own' is not NAME=VALUE" in done.output


def test_a_priority_without_effect_is_explained() -> None:
    asked = output_of("explain", DEMO, "--tenant", "acme", "--tokens", "90k", "--priority", "interactive").output
    assert "not interactive, as was asked" in asked
    assert "as was asked" not in output_of("explain", DEMO, "--tenant", "acme", "--tokens", "90k").output


def test_a_file_is_checked_where_its_secrets_are_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACME_KEY", raising=False)
    file = tmp_path / "sla.yaml"
    file.write_text("tenants:\n  acme: {keys: ['${env:ACME_KEY}', '${file:/nosuch/key}']}\n")
    assert output_of("check", str(file)).exit_code == 1
    done = output_of("check", str(file), "--without-secrets")
    assert done.exit_code == 0
    assert f"not checked: {file}:2: tenants.acme.keys[0]: the environment variable ACME_KEY is not set" in done.output
    assert (
        f"not checked: {file}:2: tenants.acme.keys[1]: cannot read /nosuch/key: No such file or directory\n"
        in done.output
    )
    assert "is sound" in done.output


def test_a_mistake_beside_an_absent_secret_is_still_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("tenants: {a: {keys: ['${env:NO_SUCH_KEY}']}}\nclases: {}\n")
    done = output_of("check", str(tmp_path / "f.yaml"), "--without-secrets")
    assert done.exit_code == 1
    assert "did you mean 'classes'?" in done.output
    assert "NO_SUCH_KEY" not in done.output


@pytest.mark.parametrize("arguments", [(), ("sla.yaml", "--to", "http://a:1")])
def test_serve_wants_either_a_file_or_engines(arguments: tuple[str, ...]) -> None:
    done = output_of("serve", *arguments)
    assert done.exit_code == 2
    assert "write either FILE or --to URL" in done.output


async def test_engines_that_run_are_served_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Config] = []
    monkeypatch.setattr(up, "run", lambda config, *_, **__: served.append(config))
    async with running(VLLMServer(model="qwen")) as engine:
        done = await asyncio.to_thread(
            output_of, "serve", "--to", engine.url, "--to", f"{engine.url}/", "--grpc", "off"
        )
    assert done.exit_code == 0
    assert f"{engine.url} is vllm, by its /metrics and serves qwen" in done.output
    assert f'    vllm: {{kind: vllm, at: ["{engine.url}"]}}' in done.output
    assert served[0].pools["vllm"].at == (engine.url,)
    assert (served[0].server.grpc, served[0].anonymous is not None) == (None, True)
    assert served[0].server.admin is not None


def test_an_engine_that_does_not_answer_is_an_error_for_people() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = output_of("serve", "--to", f"http://127.0.0.1:{port}")
    assert isinstance(done.exception, ConfigError)
    assert "nothing answers at" in str(done.exception)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    script = {"bash": "complete_bash", "zsh": "complete_zsh", "fish": "complete_fish"}[shell]
    words = {
        "bash": {"COMP_WORDS": "pointsman ser", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "pointsman ser"},
        "fish": {"_TYPER_COMPLETE_ARGS": "pointsman ser", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environment = {"_POINTSMAN_COMPLETE": script, **words}
    done = CliRunner().invoke(app, [], env=environment, prog_name="pointsman")
    assert "serve" in done.output
    assert "simulate" not in done.output
