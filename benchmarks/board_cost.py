"""Cost of the dashboard's memory per call: the board's two hooks, against telemetry without it.

python benchmarks/board_cost.py [--calls 50000]
"""

from __future__ import annotations

import argparse
import time

from policies.nouns import Decision, Request, Usage
from router.operate.dashboard.board import Board
from router.operate.telemetry.telemetry import Telemetry

NAMES = [f"own-{number}" for number in range(8)]
DECISION = Decision(
    NAMES[0],
    "default",
    scores=tuple((name, 0.5) for name in NAMES),
    details=tuple((name, score, 0.5) for name in NAMES for score in ("marginal_cost", "balance")),
)


def seconds_per_call(telemetry: Telemetry, calls: int) -> float:
    """Seconds of one call: its decision, its first and last token, its end."""
    keys = tuple(range(31))
    requests = [Request(str(n), "acme", "m", "acme", 2000, 100, "chat", block_keys=keys) for n in range(calls)]
    before = time.process_time()
    for request in requests:
        with telemetry.account(request.id) as account:
            account.tenant, account.service_class, account.model = "acme", "chat", "m"
            telemetry.decided(request, DECISION, None)
            account.heard(account.started_at + 0.1)
            account.heard(account.started_at + 1.0)
            account.usage = Usage(2000, 100, 1500)
    return (time.process_time() - before) / calls


def main() -> None:
    """Print both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50_000, help="in each of five rounds; default: 50000")
    calls = parser.parse_args().calls
    alone, listened = Telemetry(), Telemetry()
    listened.listen(Board(time.monotonic))
    seconds_per_call(alone, calls)
    without, with_it = (min(seconds_per_call(board, calls) for _ in range(5)) for board in (alone, listened))
    times = f"telemetry alone {without * 1e6:.1f} µs a call, with the board {with_it * 1e6:.1f} µs"
    print(f"{times}: {with_it / without:.2f}x")


if __name__ == "__main__":
    main()
