"""The faults, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Flag, auto

from tests.chaos import effects, strays
from tests.chaos.effects import During, all_lines, certified, clock, file, line, mode, names, redis_line, redis_set
from tests.chaos.system import COMPILER, OPENSSL, Plan
from tests.chaos.wire import State
from tests.engines.programs import MISSING

SERVERS = Plan()
SHARDS = Plan(backends="shard", count=2)
PROCESSES = Plan(processes=2)
ROUTERS = Plan(routers=2)
NAMED = Plan(has_names=True)
SMALL_DISK = Plan(has_small_disk=True)
CLOCK = Plan(has_clock=True)
CERTIFIED = Plan(has_tls=True)
# a vLLM that starts takes the cores that the other one needs to seem well
ENGINES = Plan(backends="vllm", count=2, outage="30s")


class Allowed(Flag):
    """What clients may see of a fault, beyond answers."""

    NOTHING = 0
    CUT = auto()
    """Error events in streams that had begun: the rest of an answer may be lost with its server."""
    REFUSED = auto()
    """Error statuses before anything else."""
    DISCONNECTED = auto()
    """Connections to a router that ended, or that has no descriptors left."""


class Forgotten(Flag):
    """What is lost with the memory of a process, so that it cannot be compared."""

    NOTHING = 0
    HELD = auto()
    """What a router counts and holds: it is another process afterwards."""
    BUDGETS = auto()
    """The quotas in Redis, or a part of them."""


@dataclass(frozen=True)
class Fault:
    """A fault by its name; `what` describes it for people, `behaviour` what the router does about it.

    `part` is the part that is broken: a pair of faults breaks two parts, or two servers.
    """

    name: str
    part: str
    what: str
    behaviour: str
    during: During
    plan: Plan = SERVERS
    allowed: Allowed = Allowed.NOTHING
    forgotten: Forgotten = Forgotten.NOTHING
    evidence: str = ""
    """The beginning of a metric that rises if the routers noticed; empty if requests show it."""
    least_s: float = 0.0
    """Seconds that it must last to be noticed."""

    @property
    def missing(self) -> str | None:
        """Why this machine cannot cause it, if it cannot."""
        if (self.plan.has_names or self.plan.has_small_disk) and os.geteuid() != 0:
            return "needs root"
        if self.plan.has_clock and COMPILER is None:
            return "needs a C compiler"
        if self.plan.has_tls and OPENSSL is None:
            return "needs openssl"
        return MISSING if self.plan.backends == "vllm" else None

    def __repr__(self) -> str:
        return f"<Fault {self.name}>"


CUT, REFUSED, DISCONNECTED = Allowed.CUT, Allowed.REFUSED, Allowed.DISCONNECTED
BUDGETS, PROCESS = Forgotten.BUDGETS, Forgotten.HELD | Forgotten.BUDGETS
REDIS_AWAY = 'pointsman_events_total{event="quota_store_'
FILE_REFUSED = 'pointsman_config_reloads_total{result="refused'
NAMES_FAILED = "pointsman_discovery_failures_total"

ELSEWHERE = "sends requests that their clients have seen nothing of to another server, and no new ones to this one"
SUSPECTS = "suspects it once it is silent; " + ELSEWHERE
WAITS = "lets requests wait for a server, up to `queue.outage`"
ALONE = "counts quotas alone meanwhile, and tells Redis afterwards"
KEEPS = "keeps the file that it has, and logs why"
KEEPS_ADDRESSES = "keeps the addresses that it has"

FAULTS = (
    Fault(
        "server killed",
        "server",
        "a server is killed (SIGKILL) and started again",
        ELSEWHERE,
        effects.killed,
        allowed=CUT,
    ),
    Fault(
        "all servers killed",
        "servers",
        "all servers are killed and started again",
        WAITS,
        effects.all_killed,
        allowed=CUT | REFUSED,
    ),
    Fault(
        "server ended",
        "server",
        "a server gets SIGTERM, drains, and is started again",
        ELSEWHERE,
        effects.ended,
        allowed=CUT,
    ),
    Fault(
        "server stopped", "server", "a server is stopped (SIGSTOP) and goes on", SUSPECTS, effects.stopped, allowed=CUT
    ),
    Fault(
        "all servers stopped",
        "servers",
        "all servers are stopped and go on",
        WAITS,
        effects.all_stopped,
        allowed=CUT | REFUSED,
    ),
    Fault(
        "server flaps",
        "server",
        "connections to a server are reset five times a second",
        ELSEWHERE,
        effects.flapping,
        allowed=CUT,
    ),
    Fault(
        "server without descriptors",
        "server",
        "a server cannot accept connections",
        SUSPECTS,
        effects.without_descriptors,
        allowed=CUT,
    ),
    Fault(
        "server drained",
        "server",
        "an operator drains a server, and takes that back",
        "sends new requests elsewhere",
        effects.drained,
    ),
    Fault("server errs", "server", "a server answers 500 to everything", ELSEWHERE, mode("errors")),
    Fault(
        "server busy",
        "server",
        "a server answers 429 to everything",
        "tries another server, and learns a lower limit",
        mode("busy"),
    ),
    Fault(
        "server stalls",
        "server",
        "a server stops in the middle of every answer",
        "ends requests after a time derived from the usual ones; sends new ones elsewhere",
        mode("stalls"),
        allowed=CUT | REFUSED,
    ),
    Fault(
        "server talks nonsense",
        "server",
        "the events of a server are no JSON",
        ELSEWHERE,
        mode("nonsense"),
        allowed=CUT,
    ),
    Fault("server late", "server", "a server waits 2 s before each answer", "prefers the other servers", mode("late")),
    Fault(
        "server sends errors in streams",
        "server",
        "an error event comes in the middle of the streams of a server",
        ELSEWHERE,
        mode("error event"),
        allowed=CUT,
    ),
    Fault(
        "line slow",
        "server",
        "every piece to and from a server comes 200 ms late",
        "prefers the other servers",
        line(State.SLOW),
    ),
    Fault(
        "line mute",
        "server",
        "connections to a server stay open, and nothing passes (half-open)",
        SUSPECTS,
        line(State.MUTE),
        allowed=CUT,
    ),
    Fault(
        "answers lost",
        "server",
        "a server gets requests, and its answers are lost",
        SUSPECTS,
        line(State.ANSWERS_LOST),
        allowed=CUT,
    ),
    Fault("line reset", "server", "connections to a server are reset (RST)", ELSEWHERE, line(State.RESET), allowed=CUT),
    Fault(
        "line closed",
        "server",
        "connections to a server are closed as soon as they are accepted",
        ELSEWHERE,
        line(State.REFUSED),
        allowed=CUT,
    ),
    Fault(
        "line garbled",
        "server",
        "the answers of a server are random bytes",
        ELSEWHERE,
        line(State.GARBAGE),
        allowed=CUT,
    ),
    Fault(
        "answers truncated",
        "server",
        "each connection to a server ends after 300 bytes of answers",
        ELSEWHERE,
        line(State.TRUNCATED),
        allowed=CUT,
    ),
    Fault(
        "heads only",
        "server",
        "of the answers of a server only the first head passes, then nothing",
        SUSPECTS,
        line(State.HEAD_ONLY),
        allowed=CUT,
    ),
    Fault(
        "answers dribble",
        "server",
        "the answers of a server come in pieces of seven bytes, 200 ms apart",
        "prefers the other servers",
        line(State.DRIBBLE),
        allowed=CUT,
    ),
    Fault(
        "all lines reset",
        "servers",
        "connections to all servers are reset",
        WAITS,
        all_lines(State.RESET),
        allowed=CUT | REFUSED,
    ),
    Fault(
        "redis killed",
        "redis",
        "Redis is killed, and started again empty",
        ALONE,
        effects.redis_killed,
        forgotten=BUDGETS,
        evidence=REDIS_AWAY,
    ),
    Fault("redis stopped", "redis", "Redis is stopped, and goes on", ALONE, effects.redis_stopped, evidence=REDIS_AWAY),
    Fault(
        "redis slow",
        "redis",
        "every piece to and from Redis comes 200 ms late",
        ALONE,
        redis_line(State.SLOW),
        evidence=REDIS_AWAY,
    ),
    Fault(
        "redis mute",
        "redis",
        "connections to Redis stay open, and nothing passes",
        ALONE,
        redis_line(State.MUTE),
        evidence=REDIS_AWAY,
    ),
    Fault(
        "redis reset", "redis", "connections to Redis are reset", ALONE, redis_line(State.RESET), evidence=REDIS_AWAY
    ),
    Fault(
        "redis garbled",
        "redis",
        "the answers of Redis are random bytes",
        ALONE,
        redis_line(State.GARBAGE),
        evidence=REDIS_AWAY,
    ),
    Fault(
        "redis full", "redis", "Redis has no memory left", ALONE, redis_set("maxmemory", "1", "0"), evidence=REDIS_AWAY
    ),
    Fault(
        "redis read-only",
        "redis",
        "Redis becomes a replica, and refuses to write",
        ALONE,
        effects.redis_read_only,
        evidence=REDIS_AWAY,
    ),
    Fault(
        "redis flushed",
        "redis",
        "Redis loses all keys five times a second",
        "limits begin anew",
        effects.redis_flushed,
        forgotten=BUDGETS,
    ),
    Fault(
        "router killed",
        "router",
        "the router is killed, and started again",
        "reservations in Redis lapse after a minute",
        effects.of_last_router(effects.router_killed),
        allowed=DISCONNECTED,
        forgotten=PROCESS,
    ),
    Fault(
        "router ended",
        "router",
        "the router gets SIGTERM, drains, and is started again",
        "answers the requests that it has, and refuses new ones until it ends",
        effects.of_last_router(effects.router_ended),
        allowed=DISCONNECTED | REFUSED,
        forgotten=Forgotten.HELD,
    ),
    Fault(
        "router stopped",
        "router",
        "the router is stopped, and goes on",
        "goes on where it was",
        effects.of_last_router(effects.router_stopped),
        allowed=CUT,
    ),
    Fault(
        "router without descriptors",
        "router",
        "the router cannot open connections or files",
        "uses the connections that it has",
        effects.router_without_descriptors,
        allowed=REFUSED | DISCONNECTED | CUT,
    ),
    Fault(
        "files cannot grow",
        "router",
        "every write of the router to a file fails, also to its own log",
        "serves without logs",
        effects.files_cannot_grow,
    ),
    Fault(
        "SLA file broken",
        "file",
        "the SLA file gets a mistake",
        KEEPS,
        file(lambda path, text: effects.rewrite(path, text + "\nnonsense: [\n")),
        evidence=FILE_REFUSED,
        least_s=3,
    ),
    Fault(
        "SLA file deleted",
        "file",
        "the SLA file is deleted, and comes back",
        KEEPS,
        file(lambda path, _: path.unlink()),
    ),
    Fault(
        "SLA file half-written",
        "file",
        "the SLA file ends in its middle",
        KEEPS,
        file(lambda path, text: effects.rewrite(path, text[: len(text) // 2])),
        evidence=FILE_REFUSED,
        least_s=3,
    ),
    Fault("SLA file is a pipe", "file", "the SLA file is replaced by a FIFO", KEEPS, file(effects.make_fifo)),
    Fault(
        "clients leave",
        "clients",
        "six clients at a time disconnect at random moments",
        "ends their requests",
        strays.leaving,
    ),
    Fault(
        "clients read slowly",
        "clients",
        "twenty clients read ten bytes a second",
        "buffers little for each of them",
        strays.reading_slowly,
    ),
    Fault(
        "clients pipeline",
        "clients",
        "clients send eight requests at once on a connection",
        "answers one after the other",
        strays.pipelining,
    ),
    Fault(
        "unfinished heads",
        "clients",
        "two hundred connections never finish the head of their request",
        "closes them after a while",
        strays.unfinished_heads,
    ),
    Fault(
        "clients send garbage",
        "clients",
        "clients send random bytes to the ports for HTTP and gRPC",
        "closes their connections",
        strays.sending_garbage,
    ),
    Fault(
        "clients send too much",
        "clients",
        "two clients at a time send chats of 8 MB for a model of 4,096 tokens",
        "refuses them before any work",
        strays.sending_too_much,
    ),
    Fault(
        "disk full",
        "router",
        "the disk of the log of decisions is full",
        "drops lines of that log",
        effects.disk_full,
        plan=SMALL_DISK,
    ),
    Fault(
        "clock a day ahead",
        "router",
        "the time of day of the router jumps a day ahead, and back",
        "measures durations by a clock that does not jump",
        clock(86400),
        plan=CLOCK,
    ),
    Fault(
        "clock an hour back",
        "router",
        "the time of day of the router jumps an hour back, and ahead again",
        "the same",
        clock(-3600),
        plan=CLOCK,
    ),
    Fault(
        "names fail",
        "names",
        "the name server answers SERVFAIL",
        KEEPS_ADDRESSES,
        names(effects.fail),
        plan=NAMED,
        evidence=NAMES_FAILED,
        least_s=3,
    ),
    Fault(
        "names silent",
        "names",
        "the name server does not answer",
        KEEPS_ADDRESSES,
        names(effects.say_nothing),
        plan=NAMED,
        evidence=NAMES_FAILED,
        least_s=12,
    ),
    Fault(
        "names unknown",
        "names",
        "the name server does not know the name of the servers any more",
        KEEPS_ADDRESSES + " for 30 s",
        names(effects.forget),
        plan=NAMED,
    ),
    Fault(
        "names empty",
        "names",
        "the name of the servers has no address any more",
        KEEPS_ADDRESSES + " for 30 s",
        names(effects.empty),
        plan=NAMED,
    ),
    Fault(
        "names drop one",
        "names",
        "one of three addresses disappears, and comes back",
        "sends new requests elsewhere",
        names(effects.drop_one),
        plan=NAMED,
    ),
    Fault(
        "names lie",
        "names",
        "one of three addresses is replaced by one where no program listens",
        "sends requests to the two others",
        names(effects.name_a_dead_one),
        plan=NAMED,
    ),
    Fault(
        "certificate expired",
        "server",
        "a server starts again with a certificate that has expired, and later with a good one",
        ELSEWHERE,
        certified(days=-1),
        plan=CERTIFIED,
        allowed=CUT,
    ),
    Fault(
        "certificate of a stranger",
        "server",
        "a server starts again with a certificate of a CA that is not trusted, and later with a good one",
        ELSEWHERE,
        certified(by_stranger=True),
        plan=CERTIFIED,
        allowed=CUT,
    ),
    Fault(
        "worker killed",
        "router",
        "one of two processes of a router is killed",
        "starts another one",
        effects.worker_killed,
        plan=PROCESSES,
        allowed=DISCONNECTED,
        forgotten=PROCESS,
    ),
    Fault(
        "second router killed",
        "router",
        "one of two routers is killed, and started again",
        "the other one serves; reservations in Redis lapse after a minute",
        effects.of_last_router(effects.router_killed),
        plan=ROUTERS,
        allowed=DISCONNECTED,
        forgotten=PROCESS,
    ),
    Fault(
        "second router stopped",
        "router",
        "one of two routers is stopped, and goes on",
        "the other one serves",
        effects.of_last_router(effects.router_stopped),
        plan=ROUTERS,
        allowed=CUT,
    ),
    Fault(
        "shard killed",
        "server",
        "one of two shards is killed, and started again",
        ELSEWHERE,
        effects.killed,
        plan=SHARDS,
        allowed=CUT,
    ),
    Fault(
        "shard ended",
        "server",
        "one of two shards gets SIGTERM, drains, and is started again",
        ELSEWHERE,
        effects.ended,
        plan=SHARDS,
        allowed=CUT,
    ),
    Fault(
        "shard stopped",
        "server",
        "one of two shards is stopped, and goes on",
        SUSPECTS,
        effects.stopped,
        plan=SHARDS,
        allowed=CUT,
    ),
    Fault(
        "link slow",
        "server",
        "every piece to and from a shard comes 200 ms late",
        "prefers the other shard",
        line(State.SLOW),
        plan=SHARDS,
    ),
    Fault(
        "link mute",
        "server",
        "the link to a shard stays open, and nothing passes (half-open)",
        SUSPECTS,
        line(State.MUTE),
        plan=SHARDS,
        allowed=CUT,
    ),
    Fault(
        "link reset", "server", "the link to a shard is reset", ELSEWHERE, line(State.RESET), plan=SHARDS, allowed=CUT
    ),
    Fault(
        "link garbled",
        "server",
        "random bytes come from a shard",
        ELSEWHERE,
        line(State.GARBAGE),
        plan=SHARDS,
        allowed=CUT,
    ),
    Fault(
        "vllm killed",
        "server",
        "one of two real vLLM is killed, and started again",
        ELSEWHERE,
        effects.killed,
        plan=ENGINES,
        allowed=CUT,
    ),
    Fault(
        "vllm stopped",
        "server",
        "one of two real vLLM is stopped with its processes, and goes on",
        SUSPECTS,
        effects.stopped,
        plan=ENGINES,
        allowed=CUT,
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
