"""One meaning for each public class name: the names that several files define become fewer."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies", "shards", "backends", "router", "simulation", "http1", "tls")
SHARED = frozenset(
    {
        "Account",
        "Admission",
        "Announcement",
        "Answer",
        "Backend",
        "Batch",
        "Cleared",
        "Decoder",
        "Dialect",
        "Engine",
        "Fault",
        "Field",
        "Flight",
        "Flights",
        "Found",
        "Grammar",
        "Head",
        "HttpClient",
        "Inputs",
        "Limits",
        "Load",
        "Message",
        "Metrics",
        "Model",
        "Network",
        "Node",
        "Part",
        "Peers",
        "Piece",
        "Pinned",
        "Place",
        "Queue",
        "Reach",
        "Report",
        "Request",
        "Rotation",
        "Row",
        "Run",
        "Seen",
        "Shape",
        "Span",
        "Standing",
        "Step",
        "Stream",
        "Ticket",
        "Trust",
        "Turns",
        "Work",
    }
)
"""Public class names with several meanings. Remove a name once it has one; never add any.

Most are words that the engine and the router share for their own parts (`Load`, `Grammar`, `Limits`), which never meet
in one file: `shards/` knows nothing of the router.
"""


@cache
def definitions() -> dict[str, list[str]]:
    """Public classes at the top of modules: name -> the files that define one, generated code left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in file.name:
                for node in ast.parse(file.read_text()).body:
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        found[node.name].append(str(file.relative_to(ROOT)))
    return found


def test_no_further_public_class_name_has_two_meanings() -> None:
    several = {name: files for name, files in definitions().items() if len(files) > 1}
    fresh = {name: files for name, files in several.items() if name not in SHARED}
    assert not fresh, f"these names have several meanings; give the newer class another one: {fresh}"


def test_names_with_one_meaning_are_no_exceptions_any_more() -> None:
    several = {name for name, files in definitions().items() if len(files) > 1}
    assert not SHARED - several, f"remove from SHARED, as each has one meaning now: {sorted(SHARED - several)}"
