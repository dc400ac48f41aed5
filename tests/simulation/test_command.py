"""`pointsman simulate` as people and machines see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from policies.errors import InvalidRequest
from router.start.cli import app
from tests.simulation.scene import POOL, TWO_CLASSES, written

ROOT = Path(__file__).parents[2]
PROFILE = "own: {step_ms: 10, token_us: 100, kv_tokens: 64k, running: 4}"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """An SLA file, a trace and a profile."""
    lines = [
        json.dumps(
            {
                "timestamp": 300 * number,
                "input_length": 1500 + number,
                "output_length": 30,
                "hash_ids": [number % 2, 10 + number % 4],
                "tenant": "acme" if number % 3 else "labs",
                "priority": None if number % 3 else "batch",
            }
        )
        for number in range(40)
    ]
    sla = written(
        tmp_path / "sla.yaml", TWO_CLASSES.replace("${env:A}", "${env:HOME}").replace("${env:L}", "${env:PATH}") + POOL
    )
    trace, profile = written(tmp_path / "trace.jsonl", *lines), written(tmp_path / "profile.yaml", PROFILE)
    return [str(sla), "--trace", str(trace), "--profile", str(profile)]


def output_of(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_classes_tenants_and_backends_are_shown(files: list[str]) -> None:
    done = output_of(*files)
    assert done.exit_code == 0, done.output
    assert "40 requests in " in done.output
    for word in ("chat", "batch", "acme", "labs", "own (2)", "own-1", "TTFT P50", "500ms", "5m whole", "hit rate"):
        assert word in done.output


def test_a_published_trace_in_csv_is_simulated_as_it_is(files: list[str], tmp_path: Path) -> None:
    rows = [f"{second}.0,ChatGPT,{1500 + second},30,{1530 + second},Conversation log" for second in range(20)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    trace = written(tmp_path / "BurstGPT.csv", header, *rows)
    done = output_of(files[0], "--trace", str(trace), *files[3:], "--tenant", "acme", "--json", "-")
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)["runs"]
    (pool,) = run["pools"]
    assert (run["requests"], pool["hit_rate"], pool["drawn_tokens"]) == (20, 0.0, 600)


def test_machines_get_json_and_nothing_else(files: list[str]) -> None:
    (run,) = json.loads(output_of(*files, "--json", "-").stdout)["runs"]
    assert sum(row["requests"] for row in run["classes"]) == 40
    assert {row["name"] for row in run["tenants"]} == {"acme", "labs"}


def test_the_same_seed_writes_the_same_bytes_in_any_process(files: list[str]) -> None:
    # of sets and hashes nothing may depend
    written_by = [
        subprocess.run(
            [sys.executable, "-P", "-m", "router", "simulate", *files, "--seed", "3", "--json", "-"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert written_by[0] == written_by[1]


def test_a_second_file_stands_beside_the_first(files: list[str], tmp_path: Path) -> None:
    other = written(tmp_path / "other.yaml", Path(files[0]).read_text() + "policies: {default: {score: {turn: 1}}}")
    out = tmp_path / "out.json"
    done = output_of(*files, "--against", str(other), "--json", str(out))
    assert "2 - 1" in done.output
    begins = [line.strip(" │|").partition(" ")[0] for line in done.output[done.output.index("2 - 1") :].splitlines()]
    assert [begins.count(name) for name in ("chat",)] == [1], "a class is named in its first row only"
    content = json.loads(out.read_text())
    first, second = (run["classes"][0]["ttft_s"]["p95"] for run in content["runs"])
    assert content["difference"]["chat"]["ttft_p95_s"] == pytest.approx(second - first, abs=1e-5)


def test_a_second_profile_stands_beside_the_first_with_the_same_file(files: list[str], tmp_path: Path) -> None:
    slow = written(tmp_path / "slow.yaml", "own: {step_ms: 50}")
    done = output_of(*files, "--against-profile", str(slow), "--json", "-")
    first, second = json.loads(done.stdout)["runs"]
    assert first["file"] != second["file"]
    assert second["file"].endswith("slow.yaml")
    assert second["classes"][0]["tpot_s"]["p50"] > 2 * first["classes"][0]["tpot_s"]["p50"]


def test_the_same_file_with_the_same_profile_is_no_comparison(files: list[str]) -> None:
    done = output_of(*files, "--against", files[0])
    assert done.exit_code != 0
    assert "--against is the same file" in str(done.exception) + done.output


def test_more_load_or_fewer_backends_is_one_word_away(files: list[str]) -> None:
    def busy(*words: str) -> float:
        (run,) = json.loads(output_of(*files, *words, "--json", "-").stdout)["runs"]
        return float(run["pools"][0]["utilisation"])

    usual = busy()
    assert busy("--speed", "2") > 1.5 * usual
    assert busy("--backends", "own=4") < 0.7 * usual


def test_the_fewest_backends_are_found_and_each_trial_is_printed(files: list[str]) -> None:
    done = output_of(*files, "--find-backends", "own", "--speed", "3")
    assert "in 'own'" in done.output
    assert "in 'own' meet every target:" in done.output
    content = json.loads(output_of(*files, "--find-backends", "own", "--speed", "3", "--json", "-").stdout)
    assert {trial["count"]: trial["keeps"] for trial in content["trials"]}[content["found"]]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--backends", "onw=2"), "there is no pool 'onw' .did you mean 'own'"),
        (("--tenant", "acm"), "there is no tenant 'acm' .did you mean 'acme'"),
        (("--model", "n"), "there is no model 'n'"),
        (("--decisions", "x"), "there are no requests to simulate"),
        (("--json", "/nowhere/out"), "cannot write /nowhere/out"),
    ],
)
def test_impossible_options_are_errors_in_words(files: list[str], words: tuple[str, ...], complaint: str) -> None:
    done = output_of(*files, *words)
    assert isinstance(done.exception, InvalidRequest)
    with pytest.raises(InvalidRequest, match=complaint):
        raise done.exception


def test_a_line_with_an_unknown_tenant_is_reported(files: list[str]) -> None:
    trace = Path(files[2])
    trace.write_text(trace.read_text().replace('"tenant": "labs"', '"tenant": "lab"', 1))
    done = output_of(*files)
    assert "trace.jsonl:1: there is no tenant 'lab' (did you mean 'labs'?)" in str(done.exception)


@pytest.mark.parametrize(
    "words",
    [("--speed", "0"), ("--backends", "own"), ("--backends", "own=x"), ("--against", "F", "--find-backends", "own")],
)
def test_options_that_make_no_sense_are_refused(files: list[str], words: tuple[str, ...]) -> None:
    assert output_of(*files, *(files[0] if word == "F" else word for word in words)).exit_code == 2
