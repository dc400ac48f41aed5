"""A decision log is read line by line, past lines that a crash has cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import InvalidRequest
from router.operate.telemetry.decision_log import DecisionLog
from router.operate.telemetry.decision_reader import records_of
from tests.router.operate.telemetry.test_decision_log import a_request, an_end, opened


def test_what_was_written_is_read_and_lines_that_broke_off_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(2):
        with opened(DecisionLog(str(path))) as log:
            log.put(an_end(a_request(id=f"r{number}")))
        with path.open("ab") as file:
            file.write(b'{"version": 1, "ti\n\n')
    torn: list[int] = []
    read: list[int] = []
    found = [(number, record.request) for number, record in records_of(path, on_torn=torn.append, on_read=read.append)]
    assert found == [(1, "r0"), (4, "r1")]
    assert torn == [2, 5]
    assert sum(read) == path.stat().st_size


def test_a_line_of_another_kind_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('\n{"timestamp": 0}\n')
    with pytest.raises(InvalidRequest, match=r"trace:2: .*A trace is read by `pointsman simulate --trace`"):
        list(records_of(path))


@pytest.mark.parametrize(
    ("spare", "kept"), [(0, ["r1", "r2"]), (-1, ["r2"]), (1, ["r1", "r2"]), (10**6, ["r0", "r1", "r2"])]
)
def test_the_end_of_a_log_is_read_from_its_first_whole_line(spare: int, kept: list[str], tmp_path: Path) -> None:
    path = tmp_path / "log"
    with opened(DecisionLog(str(path))) as log:
        for number in range(3):
            log.put(an_end(a_request(id=f"r{number}")))
    last_two = sum(len(line) + 1 for line in path.read_bytes().splitlines()[1:])
    assert [record.request for _, record in records_of(path, last_bytes=last_two + spare)] == kept
