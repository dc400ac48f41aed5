"""`pointsman config` for people: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from policies.errors import BackendFailed, InvalidRequest
from router.fleet.pools import Effects
from router.operate.config_desk import DraftReport, Resampled
from router.start.cli import app
from router.start.commands.config import lines_of


def config(*words: str) -> Result:
    return CliRunner().invoke(app, ["config", *words])


def test_two_files_are_compared_without_a_router(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("queue: {most: 3}")
    new.write_text("queue: {most: 4}  # more")
    assert config("diff", str(old), str(new)).output == "~ queue.most: 3 -> 4\n"
    assert config("diff", str(old), str(old)).output == "no difference\n"
    wrong = config("diff", str(old), str(tmp_path / "none.yaml"))
    assert isinstance(wrong.exception, InvalidRequest)
    assert "No such file" in str(wrong.exception)


def test_a_router_that_does_not_answer_is_an_error_for_people(tmp_path: Path) -> None:
    file = tmp_path / "sla.yaml"
    file.write_text("")
    for words in (("draft", str(file)), ("apply", "abc"), ("rollback",), ("history",), ("show",)):
        done = config(*words, "--admin", "127.0.0.1:9")
        assert isinstance(done.exception, BackendFailed), done.output
        assert "no reply from http://127.0.0.1:9" in str(done.exception)


def test_a_report_has_only_the_parts_that_say_something() -> None:
    report = DraftReport("new", "old", "old", warnings=("w",), backends=Effects(leave=("a-0", "a-1")))
    assert list(lines_of(report)) == [
        "draft new is sound; version old is in effect",
        "warning: w",
        "changes:",
        "  none in meaning",
        "backends:",
        "  leaving: a-0, a-1",
        "latest requests:",
        "  none to compare",
    ]
    report.restart, report.decisions = ("line",), Resampled(3, 0, 2)
    assert list(lines_of(report))[4:6] == ["needs a restart:", "  line"]
    assert list(lines_of(report))[-2:] == [
        "  0 of 3 would be decided differently",
        "  2 cannot be compared: their rules test what is not kept, such as headers",
    ]
    report.problems = ("f:1: x: wrong",)
    assert list(lines_of(report)) == ["draft new has 1 mistake:", "f:1: x: wrong"]
