"""The parts of a router that its operators see."""

from __future__ import annotations

from dataclasses import dataclass

from router.batches.batches import Batches
from router.call.gateway import Gateway
from router.operate.alerts import Alerts
from router.operate.audit.log import AuditLog
from router.operate.dashboard.board import Board
from router.operate.telemetry.telemetry import Telemetry
from router.operate.usage.recorder import UsageRecorder


@dataclass(frozen=True, slots=True)
class Operations:
    """One router for its operators: its parts, its telemetry, the board of its recent calls, the alerts that it sends,
    and the recorder of usage, the audit log and the batches if the file has places for them."""

    gateway: Gateway
    telemetry: Telemetry
    board: Board
    alerts: Alerts
    usage: UsageRecorder | None = None
    audit: AuditLog | None = None
    batches: Batches | None = None
