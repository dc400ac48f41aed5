"""The parts of a router that its operators see."""

from __future__ import annotations

from dataclasses import dataclass

from router.call.gateway import Gateway
from router.operate.dashboard.board import Board
from router.operate.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Operations:
    """One router for its operators: its parts, its telemetry, and the board of its recent calls."""

    gateway: Gateway
    telemetry: Telemetry
    board: Board
