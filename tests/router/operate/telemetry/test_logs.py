from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from router.operate.telemetry.logs import LogOptions, log_to
from shards.logs import JsonLines, LogFields


def a_record(message: object, *args: object, exc_info: Any = None, level: int = logging.INFO) -> logging.LogRecord:
    record = logging.LogRecord("pointsman.x", level, "file", 1, message, args, exc_info)
    record.created = 0.5
    return record


def test_a_sentence_becomes_an_object_with_time_level_and_logger() -> None:
    line = json.loads(JsonLines().format(a_record("two %s", "words", level=logging.WARNING)))
    fields = {"level": "warning", "logger": "pointsman.x", "message": "two words"}
    assert line == {"time": "1970-01-01T00:00:00.500+00:00", **fields}


def test_facts_are_fields_of_the_line_and_json_as_text() -> None:
    record = a_record(LogFields({"outcome": "finished", "scores": (("b0", 1.0),)}))
    line = json.loads(JsonLines().format(record))
    assert (line["outcome"], line["scores"]) == ("finished", [["b0", 1.0]])
    assert "message" not in line
    assert json.loads(record.getMessage()) == {"outcome": "finished", "scores": [["b0", 1.0]]}


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        text = JsonLines().format(a_record("failed", exc_info=sys.exc_info()))
    assert "\n" not in text
    assert "ValueError: no\nway" in json.loads(text)["traceback"]


def test_values_without_a_json_form_become_text() -> None:
    assert json.loads(JsonLines().format(a_record(LogFields({"what": complex(1, 2)}))))["what"] == "(1+2j)"


@contextmanager
def a_bare_root() -> Iterator[None]:
    """The root logger as in a fresh process."""
    root, config = logging.getLogger(), logging.getLogger("pointsman.config")
    before, levels = root.handlers[:], (root.level, config.level)
    root.handlers.clear()
    yield
    root.handlers[:] = before
    root.setLevel(levels[0])
    config.setLevel(levels[1])


def test_machines_get_json_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with a_bare_root():
        log_to(Console(file=StringIO()), LogOptions(as_json=True, verbose=True))
        logging.getLogger("pointsman.outcome").info(LogFields({"outcome": "finished"}))
    assert json.loads(capsys.readouterr().err)["outcome"] == "finished"


def test_people_get_sentences_and_no_decisions_unless_they_ask() -> None:
    out = StringIO()
    with a_bare_root():
        log_to(Console(file=out), LogOptions())
        logging.getLogger("pointsman.decision").info(LogFields({"chosen": "b0"}))
        logging.getLogger("pointsman.cluster").warning("b0 is away")
    assert "b0 is away" in out.getvalue()
    assert "chosen" not in out.getvalue()


def test_where_no_terminal_is_each_line_is_whole() -> None:
    out = StringIO()
    with a_bare_root():
        log_to(Console(file=out, width=40), LogOptions())
        logging.getLogger("pointsman").warning("vllm-0 is ill: %s", "it cannot be reached " * 5)
    (line,) = out.getvalue().splitlines()
    assert "WARNING vllm-0 is ill" in line
