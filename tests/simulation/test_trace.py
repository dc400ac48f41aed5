"""Traces are read line by line, and a line that cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import InvalidRequest
from router.text.token_ids import unpack
from simulation.arrivals import CHUNK_TOKENS, Arrival, settled, sped_up, usual_of
from simulation.trace import read_trace
from tests.simulation.scene import TWO_CLASSES, a_config, written

LINE = '{"timestamp": 2500, "input_length": 1030, "output_length": 20, "hash_ids": [4, 5, 6]}'


def test_a_line_of_mooncakes_trace_is_an_arrival(tmp_path: Path) -> None:
    (arrival,) = read_trace(written(tmp_path / "t", LINE))
    assert (arrival.at_s, arrival.prompt_tokens, arrival.new_tokens, arrival.chunks, arrival.line) == (
        2.5,
        1030,
        20,
        (4, 5, 6),
        1,
    )


def test_lines_come_in_the_order_of_their_times_and_only_as_many_as_asked_for(tmp_path: Path) -> None:
    early = LINE.replace("2500", "100")
    path = written(tmp_path / "t", LINE, "", early, LINE)
    assert [arrival.line for arrival in read_trace(path)] == [3, 1, 4]
    assert [arrival.line for arrival in read_trace(path, most=1)] == [1]


def test_optional_fields_name_tenant_priority_model_session_and_headers(tmp_path: Path) -> None:
    more = '"tenant": "acme", "priority": "batch", "model": "m", "session": "s", "headers": {"X-Team": "ads"}}'
    (arrival,) = read_trace(written(tmp_path / "t", LINE[:-1] + ", " + more))
    assert (arrival.tenant, arrival.priority, arrival.model, arrival.session) == ("acme", "batch", "m", "s")
    assert arrival.headers == {"x-team": "ads"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "t:2: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 5}', "t:2: Object missing required field `output_length`"),
        (LINE.replace("1030", '"many"'), "t:2: Expected `int`, got `str` - at `$.input_length`"),
        (LINE.replace("1030", "0"), "t:2: input_length is 0 and output_length 20; both must be 1 or more"),
        (LINE.replace("1030", "1030000000000"), "t:2: input_length is 1030000000000; 100,000,000 at most"),
        (LINE.replace("2500", "-1"), "t:2: timestamp is -1"),
        (LINE.replace("1030", "1024"), "t:2: 3 hash_ids name more than a prompt of 1024 tokens; 2 at most"),
        (LINE.replace("[4,", "[-4,"), "t:2: a hash_id is negative"),
        (
            LINE.replace("20,", '20, "max_output_length": 19,'),
            "t:2: max_output_length is 19, less than the answer's 20",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_a_hint(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_trace(written(tmp_path / "t", LINE, line))
    assert complaint in caught.value.message
    assert caught.value.hint


def test_an_empty_trace_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no request"):
        read_trace(written(tmp_path / "t", ""))
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_trace(tmp_path / "nowhere")


def test_prompts_are_alike_as_far_as_their_chunks_are() -> None:
    first = unpack(Arrival(1, 0.0, 1500, 1, chunks=(7, 2**60 + 8)).token_ids())
    second = unpack(Arrival(2, 0.0, 1600, 1, chunks=(7, 2**60 + 8)).token_ids())
    other = unpack(Arrival(3, 0.0, 1500, 1, chunks=(7, 8)).token_ids())
    assert (len(first), len(second)) == (1500, 1600)
    assert first[: 2 * CHUNK_TOKENS] == second[: 2 * CHUNK_TOKENS]
    assert first[2 * CHUNK_TOKENS] != second[2 * CHUNK_TOKENS]
    assert first[:CHUNK_TOKENS] == other[:CHUNK_TOKENS]
    assert first[CHUNK_TOKENS : CHUNK_TOKENS + 2] != other[CHUNK_TOKENS : CHUNK_TOKENS + 2]


def test_twice_the_speed_is_half_the_time_and_begins_at_once() -> None:
    coming = [Arrival(0, 10.0, 1, 1), Arrival(1, 14.0, 1, 1)]
    assert [arrival.at_s for arrival in sped_up(coming, 2.0)] == [0.0, 2.0]


@pytest.mark.parametrize(("last_s", "speed"), [(1e15, 1.0), (1.0, 1e-300), (1.0, 5e-324)])
def test_what_comes_in_no_lifetime_is_refused(last_s: float, speed: float) -> None:
    with pytest.raises(InvalidRequest, match="line 7 is more than ten years after"):
        sped_up([Arrival(0, 0.0, 1, 1), Arrival(1, last_s, 1, 1, line=7)], speed)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tenant": "acm"}, "there is no tenant 'acm' .did you mean 'acme'."),
        ({"tenant": "acme", "model": "n"}, "there is no model 'n' .known: m"),
        ({"tenant": "acme", "priority": "chats"}, "there is no class 'chats' .did you mean 'chat'."),
        ({}, "the line names no tenant, and the file has several .*--tenant: acme, labs"),
    ],
)
def test_unknown_names_are_reported_with_what_was_meant(fields: dict[str, str], complaint: str) -> None:
    config = a_config(TWO_CLASSES)
    with pytest.raises(InvalidRequest, match=complaint):
        settled(Arrival(0, 0.0, 1, 1, **fields), config, ["m"], usual_of(config, ["m"]))  # type: ignore[arg-type]


def test_with_several_models_a_line_has_to_name_its_own() -> None:
    config = a_config()
    with pytest.raises(InvalidRequest, match=r"the line names no model.*--model: m, n"):
        settled(Arrival(0, 0.0, 1, 1), config, ["m", "n"], usual_of(config, ["m", "n"]))
    assert settled(Arrival(0, 0.0, 1, 1), config, ["m", "n"], usual_of(config, ["m", "n"], model="n")).model == "n"
