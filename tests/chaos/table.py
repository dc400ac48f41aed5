"""Writes the tables of docs/reliability.md from the results of the long form: `python -m tests.chaos.table FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.chaos.faults import BY_NAME

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
HEAD = (
    "| fault | what the router does | what clients see | lost | longest wait | well again after | name |\n"
    + "|---" * 7
    + "|"
)
PAIR_HEAD = "| faults | what clients see | lost | longest wait | well again after |\n" + "|---" * 5 + "|"


def what_clients_see(ends: Mapping[str, int], statuses: Mapping[str, int]) -> str:
    """The ends of all requests in words."""
    parts = [f"{ends.get('whole', 0)} of {sum(ends.values())} answered"]
    if cut := ends.get("cut", 0):
        parts.append(f"{cut} {'stream ends' if cut == 1 else 'streams end'} with an error event")
    parts += [f"{count} get {_named(status)}" for status, count in sorted(statuses.items())]
    if broken := ends.get("disconnected", 0):
        parts.append(f"{broken} {'connection breaks' if broken == 1 else 'connections break or cannot be made'}")
    return "; ".join(parts)


def _named(status: str) -> str:
    return status if status.isdecimal() else f"`{status}`"


def measured(result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """The cells that a run fills."""
    ends = result["ends"]
    lost = sum(count for end, count in ends.items() if end != "whole")
    recovered = "no" if result["recovered_s"] is None else f"{result['recovered_s']:.1f}s"
    return what_clients_see(ends, result["statuses"]), str(lost), f"{result['longest_s']:.1f}s", recovered


def rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One row for each fault, in the order of the table of faults."""
    for name, fault in BY_NAME.items():
        if name in results:
            yield "| " + " | ".join((fault.what, fault.behaviour, *measured(results[name]), f"`{name}`")) + " |"


def pair_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One row for each pair."""
    for name, result in results.items():
        if len(result["faults"]) > 1:
            yield "| " + " | ".join((name, *measured(result))) + " |"


def written(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with both tables replaced."""
    for mark, head, lines in (("faults", HEAD, rows(results)), ("pairs", PAIR_HEAD, pair_rows(results))):
        table = "\n".join((head, *lines))
        begin, end = f"<!-- {mark}: written by tests/chaos/table.py -->", f"<!-- {mark}: end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), json.loads(Path(sys.argv[1]).read_text())))
