"""Checks a job's file before it runs: the form of each line, not the requests in it."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from backends.nesting import TooDeep
from router.batches.job import Problem
from router.batches.lines import MOST_ID, LinePlace, LineText, lines_of, read_line
from router.batches.pace import Pace

MOST_PROBLEMS = 20
"""Mistakes of a file that are listed."""

_MISSING = re.compile(r"missing required field `(\w+)`")


class Checked(NamedTuple):
    """What was found in a file: how many requests, and the mistakes."""

    lines: int
    problems: tuple[Problem, ...]


def check(path: Path, pace: Pace, *, endpoint: str, most_lines: int, most_bytes: int) -> Checked:
    """Look at every line of the file at `path`; its requests go to `endpoint`. Works in a thread, at this
    `pace`. Raises Interrupted."""
    problems: list[Problem] = []
    numbers, ids = array("Q"), bytearray()
    for line, raw in pace.through(lines_of(path, most_bytes=most_bytes)):
        if len(numbers) == most_lines:
            what = f"the file has more than {most_lines:,} lines, which is the limit; send several files"
            problems.append(Problem("too_many_tasks", what))
            break
        found = _request(line, raw, endpoint, most_bytes)
        if isinstance(found, Problem):
            problems.append(found)
            if len(problems) >= MOST_PROBLEMS:
                break
        else:
            numbers.append(line.number)
            ids += xxh3_128_digest(found.custom_id.encode("utf-8", "surrogatepass"))
    problems += _duplicates(numbers, ids, MOST_PROBLEMS - len(problems))
    if not numbers and not problems:
        problems.append(Problem("empty_file", "the file has no lines; write one request in each"))
    return Checked(len(numbers), tuple(sorted(problems, key=lambda problem: problem.line or 0)))


def _request(line: LinePlace, raw: bytes, endpoint: str, most_bytes: int) -> LineText | Problem:
    """The request of a line, or what is wrong with it."""

    def problem(code: str, message: str, param: str | None = None) -> Problem:
        return Problem(code, message, line.number, param)

    if len(raw) > most_bytes:
        return problem("line_too_long", f"this line has more than {most_bytes:,} bytes, which is the limit")
    try:
        found = read_line(raw)
    except msgspec.ValidationError as error:
        if (missing := _MISSING.search(str(error))) is not None:
            return problem("missing_required_parameter", f"`{missing[1]}` is missing", missing[1])
        return problem("invalid_request", f"this line is malformed: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = str(error) if isinstance(error, TooDeep | UnicodeDecodeError) else f"no JSON: {error}"
        return problem("invalid_json_line", f"this line is {what}; write one JSON object in each line")
    if not 0 < len(found.custom_id) <= MOST_ID:
        return problem("invalid_custom_id", f"`custom_id` must have 1 to {MOST_ID} characters", "custom_id")
    if found.method != "POST":
        return problem("invalid_method", f"`method` must be POST, not '{found.method[:20]}'", "method")
    if found.url != endpoint:
        return problem("invalid_url", f"`url` must be the batch's endpoint {endpoint}, not '{found.url[:80]}'", "url")
    if not bytes(found.body).startswith(b"{"):
        return problem("invalid_request", "`body` must be an object", "body")
    return found


def _duplicates(numbers: array[int], ids: bytearray, most: int) -> Iterator[Problem]:
    """A problem for each of the first `most` lines with an id that an earlier line has."""
    if most <= 0 or not numbers:
        return
    digests = np.frombuffer(bytes(ids), dtype=[("high", "<u8"), ("low", "<u8")])
    order = np.lexsort((digests["low"], digests["high"]))
    sorted_digests = digests[order]
    again = np.flatnonzero(sorted_digests[1:] == sorted_digests[:-1]) + 1
    # the sort keeps the order of equal ones
    for at in sorted(int(order[where]) for where in again)[:most]:
        line = numbers[at]
        yield Problem("duplicate_custom_id", "an earlier line has this `custom_id` too", line, "custom_id")
