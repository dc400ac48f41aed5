"""The page on diagnoses: its example has the rows that are printed, and its tables have every cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.operate.diagnose.causes import HIT_CAUSES, TPOT_CAUSES, TTFT_CAUSES
from router.start.cli import app

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples/capacity"
PAGE = (ROOT / "docs/diagnose.md").read_text()


def test_the_example_has_the_rows_that_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # not the figures: every better decision changes some of them
    for name in ("ASSISTANT_KEY", "SEARCH_KEY"):
        monkeypatch.setenv(name, name)
    file, log = tmp_path / "in-turn.yaml", tmp_path / "in-turn.log"
    file.write_text((EXAMPLE / "sla.yaml").read_text() + "\npolicies: {default: {score: {turn: 1}}}\n")
    options = ("--trace", str(EXAMPLE / "trace.jsonl"), "--profile", str(EXAMPLE / "l4-profile.yaml"))
    simulated = ("simulate", str(file), *options, "--backends", "own=4", "--requests", "60", "--log", str(log))
    assert CliRunner().invoke(app, simulated).exit_code == 0
    done = CliRunner().invoke(app, ["diagnose", str(log)])
    assert done.exit_code == 0, done.output
    for row in ("ideal", "- placement", "- engine eviction", "measured"):
        assert any(line.strip().startswith(row) for line in done.stdout.splitlines()), row
        assert f" {row}" in PAGE


@pytest.mark.parametrize("cause", [*HIT_CAUSES, *TTFT_CAUSES, *TPOT_CAUSES])
def test_the_page_explains_every_cause(cause: str) -> None:
    assert f"\n| {cause.replace('_', ' ')} |" in PAGE
