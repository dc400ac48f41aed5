"""`pointsman diagnose`: from decision logs to text, JSON and a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from policies.errors import ConfigError
from router.operate.diagnose.diagnosis import diagnosis_of
from router.operate.diagnose.logged import USUAL_MOST, read_logs
from router.operate.diagnose.nouns import Diagnosis
from router.operate.diagnose.picture import as_svg
from router.operate.diagnose.progress import BarSteps, progress, size_of
from router.operate.diagnose.text import as_text, shown
from router.terminal import inert_console


@dataclass(frozen=True, slots=True)
class DiagnoseOptions:
    """The command line's options. `json` prints JSON in place of text, and `picture` is a file for an SVG."""

    logs: Sequence[Path]
    json: bool = False
    picture: Path | None = None
    cache_tokens: int | None = None
    most: int = USUAL_MOST


def run(options: DiagnoseOptions) -> None:
    """Print the diagnosis of the logs. Raises InvalidRequest, and ConfigError if the picture cannot be written."""
    with progress() as bars:
        reading = bars.add_task("reading", total=sum(map(size_of, options.logs)))
        contents = read_logs(options.logs, most=options.most, on_read=BarSteps(bars, reading).advance)
        tries = sum(len(request.visits) for request in contents.requests)
        steps = BarSteps(bars, bars.add_task("diagnosing", total=tries))
        diagnosis = diagnosis_of(contents, cache_tokens=options.cache_tokens, on_done=lambda: steps.advance(1))
    if options.picture is not None:
        _write(options.picture, as_svg(diagnosis))
    if options.json:
        print(as_json(diagnosis), end="")  # noqa: T201
    elif sys.stdout.isatty():
        inert_console().print(shown(diagnosis))
    else:
        print(as_text(diagnosis))  # noqa: T201


def as_json(diagnosis: Diagnosis) -> str:
    """`diagnosis` as JSON."""
    return msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode() + "\n"


def _write(path: Path, svg: str) -> None:
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="choose another file with --picture"
        ) from error
