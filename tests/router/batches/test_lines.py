"""The lines of a file, checked and put in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.batches import order
from router.batches.checking import MOST_PROBLEMS, check
from router.batches.lines import lines_of
from router.batches.order import order_of
from router.batches.pace import Pace

PACE = Pace(sleep=lambda _: None)
CHAT = "/v1/chat/completions"


def a_line(number: int, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body, **fields}


def a_file(folder: Path, *lines: object) -> Path:
    path = folder / "lines.jsonl"
    texts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"\n".join(texts))
    return path


def problems(path: Path, **limits: int) -> list[tuple[int | None, str]]:
    most = {"most_lines": 1000, "most_bytes": 10_000, **limits}
    return [(problem.line, problem.code) for problem in check(path, PACE, endpoint=CHAT, **most).problems]


def test_a_good_file_has_so_many_lines(tmp_path: Path) -> None:
    path = a_file(tmp_path, a_line(1), b"", a_line(2), b"  ")
    assert check(path, PACE, endpoint=CHAT, most_lines=10, most_bytes=1000) == (2, ())


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        (b"[" * 300 + b"]" * 300, "invalid_json_line"),
        (b"[]", "invalid_request"),
        ({"custom_id": "x", "method": "POST", "url": CHAT}, "missing_required_parameter"),
        (a_line(1, custom_id=7), "invalid_request"),
        (a_line(1, custom_id=""), "invalid_custom_id"),
        (a_line(1, method="GET"), "invalid_method"),
        (a_line(1, url="/v1/embeddings"), "invalid_url"),
        (a_line(1, body=[]), "invalid_request"),
        (a_line(1, "x" * 10_000), "line_too_long"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, line: object, code: str) -> None:
    assert problems(a_file(tmp_path, a_line(0), line)) == [(2, code)]


def test_an_id_that_is_there_twice_is_named_where_it_is_again(tmp_path: Path) -> None:
    path = a_file(tmp_path, a_line(1), a_line(2), a_line(1), a_line(3), a_line(2))
    assert problems(path) == [(3, "duplicate_custom_id"), (5, "duplicate_custom_id")]


def test_an_empty_file_is_a_mistake(tmp_path: Path) -> None:
    assert problems(a_file(tmp_path, b"\n\n")) == [(None, "empty_file")]


def test_too_many_lines_are_a_mistake(tmp_path: Path) -> None:
    assert problems(a_file(tmp_path, a_line(1), a_line(2)), most_lines=1) == [(None, "too_many_tasks")]


def test_only_the_first_mistakes_are_listed(tmp_path: Path) -> None:
    assert len(problems(a_file(tmp_path, *[b"{"] * 100))) == MOST_PROBLEMS


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(5, 12))
def test_lines_are_found_whatever_their_lengths_are(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    texts = [b"x" * size for size in sizes]
    path.write_bytes(b"\n".join(texts))
    whole, found = path.read_bytes(), list(lines_of(path, most_bytes=most))
    expected = [(number, text[: most + 1]) for number, text in enumerate(texts, start=1) if text]
    assert [(line.number, raw.rstrip(b"\n")[: most + 1]) for line, raw in found] == expected
    for line, raw in found:
        assert whole[line.offset : line.offset + line.size] == raw


def numbers(path: Path, folder: Path, **options: Any) -> list[int]:
    made = order_of(path, folder, PACE, most_bytes=100_000, **options)
    places = [*made.places(0, 3), *made.places(3, 1000)]
    made.close()
    assert len(places) == made.count
    return [place.line.number for place in places]


@pytest.mark.parametrize("run_lines", [4, 7, 1000])
def test_lines_that_begin_alike_run_one_after_the_other(
    tmp_path: Path, run_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "RUN_LINES", run_lines)
    documents = ["".join(f"{name} {word} " for word in range(400)) for name in "abcd"]
    prompts = [documents[number % 4] + f"question {number}" for number in range(40)]
    found = numbers(a_file(tmp_path, *(a_line(number, text) for number, text in enumerate(prompts))), tmp_path)
    assert sorted(found) == list(range(1, 41))
    assert _changes([(number - 1) % 4 for number in found]) == 3


def test_lines_of_one_model_run_together_and_a_body_that_cannot_be_read_too(tmp_path: Path) -> None:
    bodies = [{"model": "ab"[number % 2], "prompt": f"{number}"} for number in range(10)]
    lines = [*(a_line(number, body=body) for number, body in enumerate(bodies)), a_line(10, body={"model": 7})]
    path = a_file(tmp_path, *lines)
    made = order_of(path, tmp_path, PACE, most_bytes=1000)
    assert made.models == ("a", "b", "?")
    assert _changes([place.model for place in made.places(0, 100)]) == 2
    made.close()


def test_a_job_has_a_bounded_number_of_models_with_names_of_a_bounded_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "MOST_MODELS", 3)
    monkeypatch.setattr(order, "MOST_NAME", 4)
    names = ["a", "far too long", "b", "a", "c", "d", "e", "b"]
    bodies = ({"model": name, "messages": [{"role": "user", "content": "hello"}]} for name in names)
    path = a_file(tmp_path, *(a_line(number, body=body) for number, body in enumerate(bodies)))
    made = order_of(path, tmp_path, PACE, most_bytes=1000, is_sorted=False)
    asked = {place.line.number: made.models[place.model] for place in made.places(0, 100)}
    made.close()
    assert [asked[number] for number in range(1, 9)] == ["a", "?", "b", "a", "?", "?", "?", "b"]
    assert made.models == ("a", "?", "b")


def test_lines_may_keep_the_order_of_the_file_and_be_left_out(tmp_path: Path) -> None:
    path = a_file(tmp_path, *(a_line(number, str(number)) for number in range(6)))
    assert numbers(path, tmp_path, is_sorted=False) == [1, 2, 3, 4, 5, 6]
    assert sorted(numbers(path, tmp_path, leave_out=lambda number: number in {2, 5})) == [1, 3, 4, 6]
    assert numbers(path, tmp_path, leave_out=lambda _: True) == []


def _changes(names: Sequence[object]) -> int:
    return sum(one != other for one, other in pairwise(names))


def test_the_mark_of_utf_8_at_the_beginning_of_a_file_is_no_part_of_its_first_line(tmp_path: Path) -> None:
    path = a_file(tmp_path, b"\xef\xbb\xbf" + json.dumps(a_line(1)).encode(), a_line(2))
    assert check(path, PACE, endpoint=CHAT, most_lines=10, most_bytes=1000) == (2, ())
    content = path.read_bytes()
    for place, raw in lines_of(path, most_bytes=1000):
        assert content[place.offset : place.offset + place.size] == raw
        assert raw.startswith(b"{")
