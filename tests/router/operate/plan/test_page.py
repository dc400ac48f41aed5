"""The page on capacity: its example of a plan has the rows that are printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.start.cli import app

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples/capacity"
PAGE = (ROOT / "docs/capacity.md").read_text()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of the first requests of the page's example."""
    path = Path(tmp_path_factory.mktemp("logs")) / "two.log"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ASSISTANT_KEY", "SEARCH_KEY"):
            patch.setenv(name, name)
        files = (str(EXAMPLE / "sla.yaml"), "--trace", str(EXAMPLE / "trace.jsonl"), "--requests", "60")
        options = ("--profile", str(EXAMPLE / "l4-profile.yaml"), "--backends", "own=2", "--log", str(path))
        assert CliRunner().invoke(app, ["simulate", *files, *options]).exit_code == 0
    return path


def test_the_example_has_the_columns_and_lines_that_are_printed(log: Path) -> None:
    # not the figures: every better decision changes some of them
    done = CliRunner().invoke(app, ["plan", str(log)])
    assert done.exit_code == 0, done.output
    (columns,) = (line for line in done.stdout.splitlines() if line.strip().startswith("hour "))
    assert all(column in PAGE for column in columns.split("  ") if column)
    for beginning in ("own: backends needed: ", "  why: ", "  verify: pointsman simulate sla.yaml --decisions "):
        assert any(line.startswith(beginning) for line in done.stdout.splitlines())
        assert f"\n{beginning}" in PAGE


def test_the_json_has_the_same_numbers(log: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(log), "--json"])
    assert done.exit_code == 0, done.output
    (pool,) = json.loads(done.stdout)["pools"]
    assert (pool["pool"], pool["needed"]) == ("own", pool["peak"]["needed"])
    assert sum(hour["requests"] for hour in pool["hours"]) == 60


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot read .*: No such file"),
        ("", "has no request: it is empty"),
        ('{"timestamp": 0}\n', "log:1: .*version.*decision log"),
    ],
)
def test_a_file_that_is_no_log_is_an_error_with_a_hint(text: str | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert done.exit_code != 0
    with pytest.raises(type(done.exception or SystemExit()), match=complaint):
        raise done.exception or SystemExit()
