"""`pointsman diagnose`: text, JSON and a picture from a log, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.operate.diagnose.command import DiagnoseOptions, run
from router.operate.diagnose.nouns import Diagnosis
from router.operate.diagnose.text import as_text
from router.start.cli import app
from tests.router.operate.diagnose.scene import a_file, questions, simulated


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a router that sends each request to the next backend."""
    path = Path(tmp_path_factory.mktemp("logs")) / "decisions.jsonl"
    simulated(path, a_file(policy="round_robin"), questions(60, documents=6, gap_s=0.7))
    return path


def test_the_text_has_the_losses_with_examples_and_remedies(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(DiagnoseOptions([log]))
    text = capsys.readouterr().out
    assert "60 requests in 42 s" in text
    for line in ("Hit rate: ", "- placement", "measured", "change: rules.*.policy: default", "own-1 held it"):
        assert line in text
    # no advice on what was not lost
    assert "share_with" not in text
    assert "TTFT: 0 of 60 requests missed their target (0.0%)" in text


def test_the_json_is_the_diagnosis(log: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(log), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    losses = {loss["cause"]: loss["tokens"] for loss in found["hit_rate"]["losses"]}
    assert losses["placement"] > 0
    assert sum(losses.values()) == found["hit_rate"]["ideal_tokens"] - found["hit_rate"]["measured_tokens"]


def test_the_picture_is_written_beside_the_text(log: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(log), "--picture", str(tmp_path / "out.svg")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert "Hit rate" in done.stdout


def test_a_picture_that_cannot_be_written_is_an_error_with_a_hint(log: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(log), "--picture", str(tmp_path / "missing" / "out.svg")])
    assert "cannot write" in str(done.exception)
    assert "--picture" in str(done.exception)


def test_a_size_that_is_no_number_of_tokens_is_an_error(log: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(log), "--cache-tokens", "large"])
    assert done.exit_code == 2
    assert "--cache-tokens" in done.output


def test_a_simulation_writes_a_log_that_is_diagnosed(tmp_path: Path) -> None:
    file, trace, log = (tmp_path / name for name in ("sla.yaml", "trace.jsonl", "decisions.jsonl"))
    file.write_text(
        "tenants: {acme: {anonymous: true}}\npools: {own: {kind: shard, at: ['a:1', 'a:2'], models: {m: m}}}\n"
    )
    line = '{"timestamp": %d, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2]}\n'
    trace.write_text("".join(line % (1000 * number) for number in range(8)))
    done = CliRunner().invoke(app, ["simulate", str(file), "--trace", str(trace), "--log", str(log)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["diagnose", str(log)])
    assert "8 requests" in done.stdout
    done = CliRunner().invoke(app, ["simulate", str(file), "--trace", str(trace), "--log", "l", "--against", str(file)])
    assert done.exit_code == 2
    assert "--log is for one simulation" in done.output


def test_a_diagnosis_without_a_hit_rate_says_why() -> None:
    assert "Notes\n  - no answers" in as_text(Diagnosis(1, 0.0, 1.0, ("no answers",), None, ()))
