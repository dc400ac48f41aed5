"""Decision logs are read: whole, bounded, and with a clear error if they are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.errors import InvalidRequest
from router.operate.diagnose.diagnosis import diagnosis_of
from router.operate.diagnose.logged import read_logs
from router.operate.telemetry.decision_record import packed_keys, packed_shared_keys


def a_line(number: int = 0, **fields: Any) -> str:
    """A line of the first version of the log, before it had all that a diagnosis needs."""
    seen = [{"backend": "own-0", "held_tokens": 512, "queue_s": 0.1}, {"backend": "own-1"}]
    tried = {"policy": "default", "at_s": 0.5, "backend": "own-0", "backends": 2, "seen": seen, "first_s": 1.5}
    tried |= {"last_s": 2.5, "predicted_ttft_s": 1.0}
    usual = {"version": 1, "time": 100.0 + number, "request": f"r{number}", "tenant": "acme", "domain": "acme"}
    usual |= {"model": "m", "service_class": "chat", "rank": 0, "rule": 1, "config": "1", "prompt_tokens": 1200}
    usual |= {"max_new_tokens": 50, "outcome": "finished", "code": "finished", "seconds": 2.5, "tries": [tried]}
    usual |= {"keys": packed_keys(range(1, 17)), "ttft_s": 1.5, "completion_tokens": 11, "cached_tokens": 512}
    return json.dumps({**usual, **fields})


def a_log(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_request_is_read_with_its_backend_and_what_was_believed_of_it(tmp_path: Path) -> None:
    (request,) = read_logs([a_log(tmp_path / "log", a_line())]).requests
    assert (request.id, request.at_s, request.ended_s, request.keys) == ("r0", 100.0, 102.5, (8, 16))
    assert (request.cached_tokens, request.new_tokens, request.tpot_s) == (512, 11, 0.1)
    (visit,) = request.visits
    assert (visit.backend, visit.sent_s, visit.first_s, visit.last_s) == ("own-0", 100.5, 101.5, 102.5)
    assert (dict(visit.held), visit.queue_s) == ({"own-0": 512}, 0.1)


def test_several_files_are_one_log_in_order_of_time(tmp_path: Path) -> None:
    newer, older = a_log(tmp_path / "log", a_line(3), a_line(2)), a_log(tmp_path / "log.1", a_line(1))
    assert [request.id for request in read_logs([newer, older]).requests] == ["r1", "r2", "r3"]


def test_only_the_last_requests_are_kept(tmp_path: Path) -> None:
    contents = read_logs([a_log(tmp_path / "log", *map(a_line, range(5)))], most=2)
    assert [request.id for request in contents.requests] == ["r3", "r4"]
    assert contents.left_out == 3
    assert "Older requests were left out, 3 in all: raise --requests to read them." in diagnosis_of(contents).notes


def test_the_bytes_that_were_read_are_reported(tmp_path: Path) -> None:
    path, read = a_log(tmp_path / "log", a_line(), a_line(1)), []
    read_logs([path], on_read=read.append)
    assert sum(read) == path.stat().st_size


def test_a_line_that_was_cut_off_is_skipped_and_counted(tmp_path: Path) -> None:
    contents = read_logs([a_log(tmp_path / "log", a_line(), a_line(1)[:80], "")])
    assert (len(contents.requests), contents.skipped) == (1, 1)
    assert any("1 of its lines could not be read" in note for note in diagnosis_of(contents).notes)


def test_a_log_of_an_older_version_is_diagnosed_with_notes_on_what_it_lacks(tmp_path: Path) -> None:
    lines = [a_line(number, likely_prompt_tokens=[1000, 1300]) for number in range(8)]
    found = diagnosis_of(read_logs([a_log(tmp_path / "log", *lines)]))
    assert found.hit_rate is not None
    text = "\n".join(found.notes)
    for lack in (
        "size of their cache",
        "all cache domains share",
        "without the backend's speed",
        "No request has a target",
    ):
        assert lack in text


def test_the_size_of_caches_can_be_given(tmp_path: Path) -> None:
    contents = read_logs([a_log(tmp_path / "log", a_line())])
    assert not any("size of their cache" in note for note in diagnosis_of(contents, cache_tokens=10_000).notes)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ((), r"log has no request: it is empty .*--decisions"),
        (('{"version', "nonsense"), r"has no request: none of its 2 lines is JSON"),
        ((a_line(), '{"timestamp": 0}'), r"log:2: .*version.*decision log"),
        ((a_line(version=9),), r"log:1: version 9 is not known"),
        ((a_line(keys="AAA="),), r"log:1: its keys are damaged"),
        ((a_line(keys="%%%"),), r"log:1: its keys are damaged"),
        ((a_line(time=1e300),), r"log:1: time is 1e\+300 .*1970"),
        ((a_line(time=-1.0),), r"log:1: time is -1 "),
        ((a_line(seconds=-2.0),), r"log:1: .*seconds is -2 .*not negative"),
        ((a_line(choices=0),), r"log:1: choices is 0"),
    ],
)
def test_a_file_that_is_no_decision_log_is_named_with_its_line(
    lines: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        read_logs([a_log(tmp_path / "log", *lines)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*missing: No such file or directory .*--decisions"):
        read_logs([tmp_path / "missing"])
    with pytest.raises(InvalidRequest, match=r"cannot read .*: Is a directory"):
        read_logs([tmp_path])


def test_prompts_that_begin_alike_have_equal_shared_keys() -> None:
    tokens = bytes(range(256)) * 24
    first, second = (packed_shared_keys(tokens + tail * 4096, "m") for tail in (b"a", b"b"))
    assert first[:32] == second[:32]
    assert first != second
    assert packed_shared_keys(tokens, "other") != packed_shared_keys(tokens, "m")
    assert packed_shared_keys(tokens[:2047], "m") == packed_shared_keys(b"", "m") == ""
