"""Published traces in CSV: Azure's LLM inference traces and BurstGPT. They have times and lengths, but no prompts.

Sources: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md (Patel et al., Splitwise, ISCA 2024;
Stojkovic et al., DynamoLLM, HPCA 2025); HPMLL/BurstGPT (Wang et al., 2024).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from simulation.arrivals import MOST_TOKENS, Arrival


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """One publisher's columns, by their names in the header.

    `read_s` reads a time as seconds; `time_is` describes it. `metadata` gives names to columns that rules may test.
    `has_failures`: a request that failed is in the trace, with an answer of 0 tokens.
    """

    at: str
    prompt: str
    answer: str
    read_s: Callable[[str], float]
    time_is: str
    session: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    has_failures: bool = False

    @property
    def needed(self) -> tuple[str, str, str]:
        """The columns that a header must have to be of this format."""
        return self.at, self.prompt, self.answer


def _unix_s(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


FORMATS = (
    CsvFormat(
        "TIMESTAMP", "ContextTokens", "GeneratedTokens", _unix_s, "a time like 2023-11-16 18:17:03.9799600, in UTC"
    ),
    CsvFormat(
        "Timestamp",
        "Request tokens",
        "Response tokens",
        float,
        "a number of seconds, 0 or more",
        session="Session ID",
        metadata={"model": "Model", "log_type": "Log Type"},
        has_failures=True,
    ),
)


class CsvRows:
    """Reads the rows below one header."""

    hint = "each row has one request: lengths in tokens, and a time"

    def __init__(self, layout: CsvFormat, columns: Sequence[str]) -> None:
        self._layout, self._columns = layout, columns

    @classmethod
    def under(cls, header: bytes) -> CsvRows | None:
        """The reader of the rows under this line; None if it is the header of no known format."""
        columns = _cells(header.removeprefix(b"\xef\xbb\xbf"))
        layout = next((layout for layout in FORMATS if set(layout.needed) <= set(columns)), None)
        return None if layout is None else cls(layout, columns)

    def arrival(self, row: bytes, number: int, line: int) -> Arrival | None:
        """The request in `row`; None if it failed when the trace was recorded. Raises ValueError with the mistake."""
        layout, cells = self._layout, _cells(row)
        if len(cells) != len(self._columns):
            raise ValueError(f"the row has {len(cells)} columns, and the header {len(self._columns)}")
        named = dict(zip(self._columns, cells, strict=True))
        at_s = self._seconds(named)
        prompt_tokens = self._tokens(named, layout.prompt, least=1)
        new_tokens = self._tokens(named, layout.answer, least=0 if layout.has_failures else 1)
        if not new_tokens:
            return None
        return Arrival(
            number,
            at_s,
            prompt_tokens,
            new_tokens,
            session=(named.get(layout.session) or None) if layout.session else None,
            metadata={name: named[column] for name, column in layout.metadata.items() if named.get(column)},
            line=line,
        )

    def _seconds(self, named: Mapping[str, str]) -> float:
        column, text = self._layout.at, named[self._layout.at]
        try:
            seconds = self._layout.read_s(text)
        except (ValueError, OverflowError):
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{column} is '{text[:40]}'; it must be {self._layout.time_is}")
        return seconds

    def _tokens(self, named: Mapping[str, str], column: str, *, least: int) -> int:
        text = named[column]
        # not int() alone, which takes 1_000 and digits of any script
        tokens = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not least <= tokens <= MOST_TOKENS:
            raise ValueError(f"{column} is '{text[:40]}'; it must be a whole number from {least} to {MOST_TOKENS:,}")
        return tokens


def _cells(line: bytes) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode().strip()]), [])]
    except csv.Error as error:
        raise ValueError(str(error)) from error
