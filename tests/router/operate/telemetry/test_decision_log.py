"""The decision log: whole, bounded, without a word of any prompt, and never in the way."""

from __future__ import annotations

import json
import os
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policies.errors import BackendFailed, ConfigError
from policies.learning.cost import Ahead, Latency
from policies.nouns import BackendView, ClusterView, Decision, Delta, Fetch, PrefillLeg, Request, ServiceClass, Usage
from router.fleet.cluster.flights import Flight, Flights
from router.operate.telemetry.decision_log import DecisionLog
from router.operate.telemetry.decision_record import (
    MOST_DROPPED,
    MOST_SEEN,
    Ended,
    Made,
    Record,
    SeenBackend,
    Try,
    packed_keys,
    record_of,
    unpacked_keys,
)
from tests.router.parts import CHAT, MODEL, ScriptedBackend, a_chat, a_client, a_config, a_router, an_answer

PAGE = (Path(__file__).parents[4] / "docs/decision-log.md").read_text()


def a_request(**fields: Any) -> Request:
    usual = {"id": "r", "tenant": "acme", "model": "m", "domain": "acme", "prompt_tokens": 10, "max_new_tokens": 5}
    return Request(**{**usual, "service_class": "chat", **fields})


def an_end(request: Request | None = None, made: tuple[Made, ...] = (), **fields: Any) -> Ended:
    times = {"arrived_at": 10.0, "arrived_unix_s": 1000.0, "ended_at": 12.5}
    return Ended(
        request or a_request(), 1, "v1", **{**times, "outcome": "finished", "code": "finished", **fields}, made=made
    )


def a_view(count: int) -> ClusterView:
    return ClusterView(tuple(BackendView(f"b{i}", "own", "fake", frozenset()) for i in range(count)), 0.0)


@contextmanager
def opened(log: DecisionLog) -> Iterator[DecisionLog]:
    log.open()
    try:
        yield log
    finally:
        log.close()


def lines_of(path: Path) -> list[Record]:
    return [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines() if line]


async def logged(tmp_path: Path, *backends: ScriptedBackend, body: Any = None, **headers: str) -> list[Record]:
    """The log's records of one call."""
    path = tmp_path / "decisions.jsonl"
    config = a_config(decision_log=str(path))
    async with a_router(*backends, config=config) as router, a_client(router) as client:
        await client.answer(CHAT, body or a_chat(), headers=headers)
    return lines_of(path)


@pytest.mark.parametrize(("blended", "logged_as"), [(5, 5), (0, None)])
async def test_blended_tokens_are_logged_beside_cached_ones(
    tmp_path: Path, blended: int, logged_as: int | None
) -> None:
    backend = ScriptedBackend(scripts=[an_answer("a", usage=Usage(20, 2, 8, blended_tokens=blended))])
    (record,) = await logged(tmp_path, backend)
    assert (record.cached_tokens, record.blended_tokens) == (8, logged_as)


async def test_each_prompt_leaves_one_line_with_sizes_decision_and_outcome(tmp_path: Path) -> None:
    backend = ScriptedBackend(scripts=[an_answer("a", "b", usage=Usage(20, 2, 8))])
    (record,) = await logged(tmp_path, backend, body=a_chat(max_tokens=7))
    request = backend.requests[0]
    assert (record.request, record.tenant, record.model) == (request.id, "acme", MODEL)
    assert (record.prompt_tokens, record.max_new_tokens) == (request.prompt_tokens, 7)
    assert (record.service_class, record.rule, record.config) == ("chat", 1, "1")
    assert (record.outcome, record.completion_tokens, record.cached_tokens) == ("finished", 2, 8)
    (tried,) = record.tries
    assert (tried.backend, tried.policy, tried.backends) == ("b0", "default", 1)
    assert [seen.backend for seen in tried.seen] == ["b0"]
    assert record.ttft_s is not None
    assert tried.first_s == record.ttft_s
    assert tried.last_s is not None
    assert 0 <= tried.at_s <= record.ttft_s <= tried.last_s <= record.seconds


async def test_no_line_says_anything_of_prompt_answer_key_or_session(tmp_path: Path) -> None:
    backend = ScriptedBackend(scripts=[an_answer("SECRET-ANSWER")])
    body = a_chat("SECRET-PROMPT " * 200, user="SECRET-USER")
    await logged(tmp_path, backend, body=body, **{"x-pointsman-session": "SECRET-SESSION"})
    text = (tmp_path / "decisions.jsonl").read_text()
    assert "SECRET" not in text
    assert "acme-key" not in text
    assert json.loads(text)["session"]


async def test_every_try_of_a_prompt_is_there_and_how_it_ended(tmp_path: Path) -> None:
    broken = [ScriptedBackend(f"b{i}", scripts=[[BackendFailed("no")]] * 3) for i in range(2)]
    (record,) = await logged(tmp_path, *broken)
    assert sorted(str(tried.backend) for tried in record.tries) == ["None", "b0", "b1"]
    assert (record.outcome, record.code, record.completion_tokens) == ("failed", "backend_failed", None)
    assert record.ttft_s is None


async def test_the_span_of_a_prompt_without_a_backend_has_the_reason(tmp_path: Path) -> None:
    (record,) = await logged(tmp_path, body=a_chat(response_format={"type": "json_object"}))
    (tried,) = record.tries
    assert tried.backend is None
    assert tried.dropped
    assert record.outcome == "rejected"


async def test_a_log_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    config = a_config(decision_log=str(tmp_path / "missing" / "log"))
    with pytest.raises(ConfigError, match=r"decision log .*missing"):
        async with a_router(config=config):
            pass


def test_keys_are_thinned_to_one_for_512_tokens() -> None:
    assert packed_keys(range(7)) == ""
    keys = [2**64 - 1 - number for number in range(17)]
    packed = b64decode(packed_keys(keys))
    assert [int.from_bytes(packed[at : at + 8], "little") for at in (0, 8)] == [keys[7], keys[15]]
    assert len(packed) == 16


def test_a_view_of_a_thousand_backends_is_cut_to_the_best() -> None:
    scores = tuple((f"b{i}", i / 1000) for i in range(900))
    dropped = tuple((f"b{i}", "healthy") for i in range(900, 1000))
    made = Made(11.0, Decision("b899", "p", dropped, scores), a_view(1000))
    (tried,) = record_of(an_end(made=(made,))).tries
    assert [seen.backend for seen in tried.seen] == [f"b{i}" for i in range(899, 899 - MOST_SEEN, -1)]
    assert (tried.backends, len(tried.dropped), tried.at_s) == (1000, MOST_DROPPED, 1.0)


def test_the_chosen_backend_is_kept_even_if_others_have_better_scores() -> None:
    scores = tuple((f"b{i}", i / 100) for i in range(30))
    (tried,) = record_of(an_end(made=(Made(11.0, Decision("b3", "p", (), scores), a_view(30)),))).tries
    assert len(tried.seen) == MOST_SEEN
    assert tried.seen[-1].backend == "b3"


def test_the_speed_of_the_chosen_backend_is_kept_with_its_pace_among_its_pool() -> None:
    usual, slow = Latency(), Latency(token_s=2e-4, step_s=0.015)
    backends = [
        BackendView(name, pool, "fake", frozenset(), latency=latency, cache_tokens=4096)
        for name, pool, latency in (("b0", "own", usual), ("b1", "own", slow), ("b2", "other", slow))
    ]
    view = ClusterView(tuple(backends), 0.0)
    tried = [record_of(an_end(made=(Made(11.0, Decision(name, "p"), view),))).tries[0] for name in ("b0", "b1", "b2")]
    assert [attempt.pace for attempt in tried] == [(1.0, 1.0), (4.0, 1.5), (1.0, 1.0)]
    assert tried[1].speed == (0.02, 2e-4, 2e-9, 0.015, 1e-4, 3e-8)
    assert tried[1].cache_tokens == 4096


def test_kv_from_another_backend_is_kept() -> None:
    fetching = Decision("b0", "p", fetch=Fetch("b1", 640, 0.1234567, 0.5))
    apart = Decision("b0", "p", prefill=PrefillLeg("p0", 1.0, 1.0))
    made = tuple(Made(11.0, decision, a_view(2)) for decision in (fetching, apart))
    first, second = record_of(an_end(made=made)).tries
    assert (first.fetch, first.prefill) == (("b1", 640, 0.123457), None)
    assert (second.fetch, second.prefill) == (None, "p0")


def test_the_targets_of_the_class_are_kept() -> None:
    promised = ServiceClass("chat", 0, ttft_s=0.5, tpot_s=0.04)
    record = record_of(an_end(a_request(promised=promised)))
    assert (record.ttft_target_s, record.tpot_target_s) == (0.5, 0.04)


def test_keys_of_text_stand_for_the_tokens_that_such_a_prompt_has() -> None:
    text = a_request(prompt_tokens=900, likely_prompt_tokens=(800, 1000), block_keys=tuple(range(18)))
    assert record_of(an_end(text)).key_tokens == 400
    assert record_of(an_end(a_request(block_keys=tuple(range(18))))).key_tokens == 512


def test_packed_keys_are_unpacked_again_and_damaged_ones_are_an_error() -> None:
    assert unpacked_keys(packed_keys(range(17))) == (7, 15)
    for damaged in ("AAA=", "%%"):
        with pytest.raises(ValueError, match=r"whole|base64|characters"):
            unpacked_keys(damaged)


def test_times_and_scores_have_six_digits_behind_the_point() -> None:
    book = Flights()
    flight = Flight("b0", a_request(), 10, 10.0000041, Ahead(), 1, 1, 0.5, True, book, lambda _: None)
    book.begin(flight)
    for at in (10.1234567, 11.7654321):
        flight.heard(Delta(token_ids=(1,)), at)
    backend = BackendView("b0", "own", "fake", frozenset(), queue_s=0.0123456789, reported_s_ago=0.3333333)
    decision = Decision("b0", "p", scores=(("b0", 2 / 3),), predicted_ttft_s=0.0765432198)
    made = Made(10.0000041, decision, ClusterView((backend,), 0.0), flight)
    record = record_of(an_end(made=(made,), arrived_unix_s=1000.1234567, ended_at=12.3456789))
    assert (record.time, record.seconds, record.ttft_s) == (1000.123457, 2.345679, 0.123457)
    (tried,) = record.tries
    assert (tried.at_s, tried.first_s, tried.last_s) == (0.000004, 0.123457, 1.765432)
    assert (tried.predicted_ttft_s, tried.scores) == (0.076543, (("b0", 0.666667),))
    assert [(seen.queue_s, seen.age_s) for seen in tried.seen] == [(0.012346, 0.333333)]


def test_what_waits_is_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    dropped: list[int] = []
    log = DecisionLog(str(pipe), on_dropped=dropped.append, most_waiting=4)
    # the pipe has no reader: the writer is stuck as on a disk that hangs
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log.open()
    wide = Decision("b0", "p", scores=tuple((f"b{i}" * 40, 0.5) for i in range(16)))
    for _ in range(200):
        log.put(an_end(made=(Made(11.0, wide, a_view(1)),) * 20))
    assert sum(dropped) > 0
    assert "wait>" in repr(log)
    received = bytearray()

    def drain() -> None:
        os.set_blocking(reader, True)
        while piece := os.read(reader, 1 << 16):
            received.extend(piece)

    draining = threading.Thread(target=drain)
    draining.start()
    log.close()
    draining.join()
    os.close(reader)
    assert received.count(b"\n") == 200 - sum(dropped)


def test_a_file_that_has_grown_is_put_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(6):
        with opened(DecisionLog(str(path), file_bytes=1, keep=3)) as log:
            log.put(an_end(a_request(id=f"r{number}")))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.1", "log.2", "log.3"]
    assert [lines_of(tmp_path / f"log.{n}")[0].request for n in (1, 2, 3)] == ["r5", "r4", "r3"]


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(2):
        with opened(DecisionLog(str(path))) as log:
            log.put(an_end(a_request(id=f"r{number}")))
    assert [record.request for record in lines_of(path)] == ["r0", "r1"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    dropped: list[int] = []
    with opened(DecisionLog("/dev/full", on_dropped=dropped.append)) as log:
        log.put(an_end())
        log.put(an_end())
    assert sum(dropped) == 2


def test_standard_output_is_a_stream_like_any_other(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with opened(DecisionLog("-")) as log:
        log.put(an_end())
    assert msgspec.json.decode(capfdbinary.readouterr().out, type=Record).request == "r"


async def test_dropped_lines_show_in_the_metrics(tmp_path: Path) -> None:
    config = a_config(decision_log="/dev/full")
    async with a_router(config=config) as router, a_client(router) as client:
        await client.answer(CHAT, a_chat())
        telemetry = router.telemetry
    assert b'pointsman_events_total{event="decision_log_dropped"} 1.0' in telemetry.exposition()[0]


@pytest.mark.parametrize(
    ("title", "struct"), [("A line", Record), ("Each of `tries`", Try), ("Each of `seen`", SeenBackend)]
)
def test_the_page_names_every_field_and_no_other(title: str, struct: type[msgspec.Struct]) -> None:
    table = PAGE.partition(title)[2].partition("|---")[2].partition("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines()[1:]]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(struct.__struct_fields__)


def test_a_file_that_cannot_be_set_aside_grows_and_no_line_is_lost_or_counted_as_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("router.operate.telemetry.decision_log.set_aside", refuse)
    path, dropped = tmp_path / "decisions.jsonl", list[int]()
    with opened(DecisionLog(str(path), file_bytes=100, on_dropped=dropped.append)) as log:
        for _ in range(50):
            log.put(an_end())
    assert (len(lines_of(path)), dropped) == (50, [])


@pytest.mark.parametrize("how", ["renamed", "deleted", "truncated"])
def test_a_file_that_another_program_rotates_is_left_to_it(how: str, tmp_path: Path) -> None:
    path, old = tmp_path / "decisions.jsonl", tmp_path / "decisions.jsonl-20261128"
    with opened(DecisionLog(str(path))) as log:
        log.put(an_end())
        while not path.stat().st_size:
            threading.Event().wait(0.005)
        if how == "renamed":
            path.rename(old)
        elif how == "deleted":
            path.unlink()
        else:
            os.truncate(path, 0)
        log.put(an_end())
    assert len(lines_of(path)) == 1
    assert not old.exists() or len(lines_of(old)) == 1


def test_a_decision_that_no_line_can_hold_is_dropped_alone(tmp_path: Path) -> None:
    path, dropped = tmp_path / "decisions.jsonl", list[int]()
    with opened(DecisionLog(str(path), on_dropped=dropped.append)) as log:
        for code in ("finished", "half \ud83d", "finished"):
            log.put(an_end(code=code))
    assert (len(lines_of(path)), dropped) == (2, [1])


def test_it_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.touch(0o644)
    shared = tmp_path / "shared.jsonl"
    shared.touch()
    shared.chmod(0o640)
    for each in (path, tmp_path / "new.jsonl", shared):
        with opened(DecisionLog(str(each))):
            pass
    assert [each.stat().st_mode & 0o777 for each in sorted(tmp_path.iterdir())] == [0o600, 0o600, 0o640]
