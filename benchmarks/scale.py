"""Cost of routers that share, up to 64 routers, 5,000 backends and 20,000 requests per second.

    python benchmarks/scale.py costs [--save FILE]      unit costs, measured with real parts on a real Redis
    python benchmarks/scale.py model [--costs FILE]     the curves that follow, with exponents and bends
    python benchmarks/scale.py real [--loads 4,100,60 ...] [--costs FILE]
                                                        routers on a real Redis: predicted and measured
    python benchmarks/scale.py hits [--routers 1 8 64] [--backends 64] [--every 0.015] [--cells 1]
                                                        hit rates, on a virtual clock

Without `--costs` they are measured first. `model` assumes that routers and Redis use 70 % of a core at most. A load of
`real` is a number of routers, of backends, and of requests per second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import get_args

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.scale_parts import costs as unit_costs
from benchmarks.scale_parts.hits import Kept, Setup, hits
from benchmarks.scale_parts.model import BUSY, Costs, Fleet, Needs, exponent, most_requests, needs, routers_needed
from benchmarks.scale_parts.real import Load, measure
from tests.router.shared.store.parts import a_redis

ROUTERS, BACKENDS, REQUESTS_PER_S = 64, 5000, 20_000.0
"""The largest deployment."""
SIZES = (1, 2, 4, 8, 16, 32, 64)

COLUMNS = (
    ("messages/s", lambda found: found.entries_read),
    ("MB/s in", lambda found: found.bytes_in / 1e6),
    ("MB/s out", lambda found: found.bytes_out / 1e6),
    ("Redis: news", lambda found: found.redis_news),
    ("Redis: quotas", lambda found: found.redis_quotas),
    ("router: own", lambda found: found.own),
    ("router: heard", lambda found: found.sharing),
    ("router: GB", lambda found: found.router_bytes / 1e9),
    ("known", lambda found: found.known),
)


def measured_costs(rounds: int) -> Costs:
    """The median of each cost over so many rounds."""
    with a_redis() as server:
        found = [asdict(uvloop.run(unit_costs.measured(server))) for _ in range(rounds)]
    return Costs(**{name: median(costs[name] for costs in found) for name in found[0]})


def show_costs(costs: Costs) -> None:
    for name, value in asdict(costs).items():
        unit, shown = (
            ("us", 1e6 * value) if name.endswith("_s") else ("bytes" if name.endswith("_bytes") else "", value)
        )
        print(f"{name:26} {shown:14,.3f} {unit}")


def cell_of(routers: int, *, learns: bool, events: int = 1) -> Fleet:
    """A cell with so many of the 64 routers, and its part of the backends and requests; answers have `events`."""
    backends, rate = BACKENDS * routers // ROUTERS, REQUESTS_PER_S * routers / ROUTERS
    return Fleet(routers, backends, rate, learns=learns, events=events)


def show_curves(costs: Costs) -> None:
    for learns in (True, False):
        fleets = [cell_of(routers, learns=learns) for routers in SIZES]
        found = [needs(fleet, costs) for fleet in fleets]
        print(f"\nbackends {'without' if learns else 'with'} cache events; shares of a core")
        heads = [head for head, _ in COLUMNS]
        print(table(["routers", "backends", "requests/s", *heads], [*map(row, fleets, found), exponents(found)]))
    print("\nmost requests/s of one cell, of all its routers and of each")
    print(table(["routers", "short", "each", "events, short", "each", "streams", "each"], limits(costs)))
    print("\nrouters that are needed, short answers and streams of 33 events; caches without events")
    print(
        table(
            ["requests/s", "backends", "short: one cell", "of 8", "of 4", "streams: one cell", "of 8", "of 4"],
            plans(costs),
        )
    )
    print(f"\n{REQUESTS_PER_S:,.0f} requests/s, {BACKENDS:,} backends, {ROUTERS} routers, by the number of cells")
    rows = []
    for cells, learns in product((1, 2, 4, 8, 16), (True, False)):
        each = needs(cell_of(ROUTERS // cells, learns=learns), costs)
        kind = "learned" if learns else "events"
        rows.append([f"{cells}", kind, *(f"{each_of(each):.3g}" for each_of in (_redis, _router, _heard, _memory))])
    print(table(["cells", "caches known by", "Redis of a cell", "router", "of it heard", "GB"], rows))
    share = needs(cell_of(ROUTERS, learns=True), costs).redis_quotas
    print(f"\nquotas of all: {share:.2f} cores of Redis, {-(-share // BUSY):.0f} servers at {BUSY:.0%}")


def row(fleet: Fleet, found: Needs) -> list[str]:
    figures = [f"{figure(found):.3g}" for _, figure in COLUMNS]
    return [f"{fleet.routers}", f"{fleet.backends}", f"{fleet.requests_per_s:,.0f}", *figures]


def exponents(found: Sequence[Needs]) -> list[str]:
    """The slopes over the last three sizes."""
    slopes = [exponent(SIZES[-3:], [figure(each) for each in found[-3:]]) for _, figure in COLUMNS]
    return ["exponent", "1", "1", *(f"{slope:.2f}" for slope in slopes)]


def limits(costs: Costs) -> list[list[str]]:
    """The most requests per second at which routers of one cell are busy: short answers with learned caches, with
    events, and streams of 33 events with learned caches."""
    rows = []
    for routers in SIZES:
        row = [f"{routers}"]
        for learns, events in ((True, 1), (False, 1), (True, 33)):
            most = most_requests(cell_of(routers, learns=learns, events=events), costs)
            row += [f"{most:,.0f}", f"{most / routers:,.0f}"]
        rows.append(row)
    return rows


def plans(costs: Costs) -> list[list[str]]:
    """The routers that are needed in one cell and in cells of eight and of four, by the rate of requests."""
    rows = []
    for rate in (200, 1000, 2000, 5000, 10_000, 20_000):
        row = [f"{rate:,}", f"{rate // 4:,}"]
        for events in (1, 33):
            whole = Fleet(1, rate // 4, rate, events=events)
            for in_each_cell in (None, 8, 4):
                count = routers_needed(whole, costs, in_each_cell=in_each_cell)
                row.append("-" if count is None else f"{count}")
        rows.append(row)
    return rows


def _redis(found: Needs) -> float:
    return found.redis_news


def _router(found: Needs) -> float:
    return found.router


def _heard(found: Needs) -> float:
    return found.sharing


def _memory(found: Needs) -> float:
    return found.router_bytes / 1e9


def show_real(costs: Costs, loads: Sequence[Load]) -> None:
    rows = []
    with a_redis() as server:
        for load in loads:
            found = measure(server, load)
            cells, rate = load.cells, found.served / load.cells
            cell = Fleet(
                load.routers // cells, load.backends // cells, rate, load.blocks, busy_s=load.busy_s, limited=0
            )
            expected = needs(replace(cell, learns=load.learns), costs)
            pairs = (
                (cells * expected.exchanges, found.exchanges),
                (cells * expected.entries_written, found.entries_written),
                (cells * expected.bytes_in / 1e3, found.bytes_in / 1e3),
                (cells * expected.bytes_out / 1e3, found.bytes_out / 1e3),
                (100 * cells * expected.redis_news, 100 * found.redis),
                (100 * expected.sharing, 100 * found.router),
            )
            late = "{:.0f} and {:.0f} ms".format(*(1000 * delay for delay in found.late_s))
            name = f"{load.routers} routers in {cells}, {load.backends} backends, {found.served:.0f} requests/s"
            rows.append([name, *(f"{model:.3g}, {real:.3g}" for model, real in pairs), late])
            print(rows[-1], flush=True)
    heads = ["exchanges/s", "written/s", "kB/s in", "kB/s out", "Redis, %", "router, %"]
    print(table(["predicted, measured", *heads, "news late: P50, P99"], rows))


def show_hits(setups: Sequence[Setup]) -> None:
    for setup in setups:
        found = hits(setup)
        words = " ".join(f"{name} {value}" for name, value in setup._asdict().items())
        print(f"{words}: hit rate {found.rate:.1%}, {found.of_ideal:.3f} of ideal, {found.failed} failed", flush=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", choices=["costs", "model", "real", "hits"])
    options.add_argument("--save", type=Path)
    options.add_argument("--costs", type=Path)
    options.add_argument("--rounds", type=int, default=5, help="of measuring costs; the median counts")
    options.add_argument("--loads", nargs="+", default=["4,100,60", "8,100,60"])
    options.add_argument("--seconds", type=float, default=15.0)
    options.add_argument("--routers", nargs="+", type=int, default=[1, 8, 64])
    options.add_argument("--backends", nargs="+", type=int, default=[64])
    options.add_argument("--cells", type=int, default=1)
    options.add_argument("--every", type=float, default=0.015, help="seconds between exchanges; 0: never")
    options.add_argument("--requests", type=int, default=1500)
    options.add_argument("--kept", choices=get_args(Kept), default="tenant", help="what always goes to the same cell")
    chosen = options.parse_args()
    if chosen.part == "hits":
        sizes = product(chosen.routers, chosen.backends)
        every_s = chosen.every or None
        show_hits([Setup(*size, chosen.cells, chosen.kept, every_s, chosen.requests) for size in sizes])
        return
    costs = (
        msgspec.json.decode(chosen.costs.read_bytes(), type=Costs) if chosen.costs else measured_costs(chosen.rounds)
    )
    if chosen.part == "model":
        show_curves(costs)
    elif chosen.part == "real":
        numbers = [text.split(",") for text in chosen.loads]
        loads = [Load(int(routers), int(backends), float(rate)) for routers, backends, rate in numbers]
        show_real(costs, [load._replace(seconds=chosen.seconds, cells=chosen.cells) for load in loads])
    else:
        show_costs(costs)
        if chosen.save:
            chosen.save.write_bytes(msgspec.json.format(msgspec.json.encode(costs)))


if __name__ == "__main__":
    main()
