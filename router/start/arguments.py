"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SlaFile = Annotated[Path, typer.Argument(metavar="FILE", help="The SLA file (YAML).", show_default=False)]

AdminAt = Annotated[str, typer.Option("--admin", metavar="HOST:PORT", help="The router's address for operators.")]
USUAL_ADMIN = "127.0.0.1:8082"
