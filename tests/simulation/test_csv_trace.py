"""Published traces in CSV are known by their headers; a row that cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import InvalidRequest
from simulation.arrivals import sped_up
from simulation.trace import read_trace
from tests.simulation.scene import written

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_ROW = "2023-11-16 18:17:03.9799600,4808,10"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_ROW = "5,ChatGPT,472,18,490,Conversation log"


def test_azures_times_and_lengths_are_read_and_prompts_share_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "t", AZURE, AZURE_ROW, "2023-11-16 18:17:04.0319600,3180,8")
    first, second = sped_up(read_trace(path), 1.0)
    assert (first.at_s, first.prompt_tokens, first.new_tokens, first.line) == (0.0, 4808, 10, 2)
    assert (second.at_s, second.prompt_tokens, second.new_tokens, second.line) == (0.052, 3180, 8, 3)
    assert first.chunks == second.chunks == ()
    assert first.token_ids()[:8] != second.token_ids()[:8]


def test_azures_traces_of_2024_give_the_time_zone(tmp_path: Path) -> None:
    rows = ("2024-05-12 00:00:00.5+00:00,100,10", "2024-05-12 02:00:01+02:00,100,10", "2024-05-12 00:00:02,100,10")
    arrivals = sped_up(read_trace(written(tmp_path / "t", AZURE, *rows)), 1.0)
    assert [arrival.at_s for arrival in arrivals] == [0.0, 0.5, 1.5]


def test_burstgpts_columns_are_read_and_rules_may_test_its_model_and_log(tmp_path: Path) -> None:
    (arrival,) = read_trace(written(tmp_path / "t", BURST, BURST_ROW))
    assert (arrival.at_s, arrival.prompt_tokens, arrival.new_tokens) == (5.0, 472, 18)
    assert arrival.metadata == {"model": "ChatGPT", "log_type": "Conversation log"}
    assert (arrival.model, arrival.session, arrival.chunks) == (None, None, ())


def test_burstgpts_later_files_have_sessions_too(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = ("9.5,1722ac82,43,GPT-4,906,446,1352,Conversation log", "9.75,,2,ChatGPT,36,29,65,API log")
    arrivals = read_trace(written(tmp_path / "t", header, *rows))
    assert [(arrival.at_s, arrival.session) for arrival in arrivals] == [(9.5, "1722ac82"), (9.75, None)]


def test_what_failed_when_burstgpt_was_recorded_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "t", BURST, "1,GPT-4,300,0,300,API log", BURST_ROW, "6,GPT-4,30,2,32,API log")
    assert [arrival.line for arrival in read_trace(path)] == [3, 4]
    assert [arrival.line for arrival in read_trace(path, most=1)] == [3]
    with pytest.raises(InvalidRequest, match="has no request"):
        read_trace(written(tmp_path / "t", BURST, "1,GPT-4,300,0,300,API log"))


def test_a_byte_order_mark_quotes_and_other_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(f'\ufeff{AZURE}\r\n"2023-11-16 18:17:03", 4808 ,10\r\n\r\n'.encode())
    (arrival,) = read_trace(path)
    assert (arrival.prompt_tokens, arrival.new_tokens) == (4808, 10)


@pytest.mark.parametrize(
    ("header", "row", "complaint"),
    [
        (AZURE, "2023-11-16 18:17:03.9799600,4808", "t:3: the row has 2 columns, and the header 3"),
        (
            AZURE,
            AZURE_ROW.replace("2023-11-16", "yesterday"),
            "t:3: TIMESTAMP is 'yesterday 18:17:03.9799600'; it must",
        ),
        (
            AZURE,
            AZURE_ROW.replace("2023", "1923"),
            "t:3: TIMESTAMP is '1923-11-16 18:17:03.9799600'; it must be a time",
        ),
        (AZURE, AZURE_ROW.replace("4808", "many"), "t:3: ContextTokens is 'many'; it must be a whole number from 1"),
        (AZURE, AZURE_ROW.replace("4808", "4_808"), "t:3: ContextTokens is '4_808'"),
        (AZURE, AZURE_ROW.replace("4808", "48.5"), "t:3: ContextTokens is '48.5'"),
        (AZURE, AZURE_ROW.replace("4808", "9" * 5000), f"t:3: ContextTokens is '{'9' * 40}'; it must"),
        (AZURE, AZURE_ROW.replace("4808", "100000001"), "t:3: ContextTokens is '100000001'"),
        (AZURE, AZURE_ROW.replace(",10", ",0"), "t:3: GeneratedTokens is '0'; it must be a whole number from 1 to"),
        (AZURE, '"' + AZURE_ROW, "t:3: the row has 1 columns"),
        (BURST, BURST_ROW.replace("5,", "nan,", 1), "t:3: Timestamp is 'nan'; it must be a number of seconds, 0 or"),
        (BURST, BURST_ROW.replace("5,", "1e999,", 1), "t:3: Timestamp is '1e999'"),
        (BURST, BURST_ROW.replace("5,", "-1,", 1), "t:3: Timestamp is '-1'"),
        (BURST, BURST_ROW.replace("472", ""), "t:3: Request tokens is ''"),
        (BURST, BURST_ROW.replace(",18,", ",-1,"), "t:3: Response tokens is '-1'; it must be a whole number from 0"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_a_hint(tmp_path: Path, header: str, row: str, complaint: str) -> None:
    good = {AZURE: AZURE_ROW, BURST: BURST_ROW}[header]
    with pytest.raises(InvalidRequest) as caught:
        read_trace(written(tmp_path / "t", header, good, row))
    assert complaint in caught.value.message
    assert caught.value.hint


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(f"{AZURE}\n".encode() + b"\xff\xfe,1,1\n")
    with pytest.raises(InvalidRequest, match="t:2: "):
        read_trace(path)


@pytest.mark.parametrize("first", [b"time,prompt,answer", b"TIMESTAMP,ContextTokens", b"\xff\xfe", b"[1, 2]"])
def test_another_first_line_is_refused_with_the_known_headers(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(first + b"\n1,2,3\n")
    with pytest.raises(InvalidRequest, match="t:1: the first line is neither a JSON object nor the header") as caught:
        read_trace(path)
    assert "TIMESTAMP, ContextTokens, GeneratedTokens or Timestamp, Request tokens" in caught.value.hint
