"""Every byte of an audit log is covered: what is changed, added, removed or exchanged shows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.operate.audit.chain import START, BrokenChainError, Chain, ChainPlace
from router.operate.audit.reader import checked

CHAINS = [Chain(), Chain(b"a secret")]


def lines_of(chain: Chain, count: int) -> list[bytes]:
    place, lines = START, []
    for number in range(count):
        line, place = chain.line({"at": f"2026-11-25T18:00:{number:02}.000Z", "event": "call", "name": "ann"}, place)
        lines.append(line)
    return lines


def problem(path: Path, chain: Chain) -> tuple[int, str] | None:
    """The number of the first bad line, and what is wrong with it."""
    return next(((found.number, found.problem) for found in checked(path, chain) if found.problem), None)


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_a_log_that_was_left_alone_is_whole(chain: Chain, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b"".join(lines_of(chain, 20)))
    assert problem(path, chain) is None


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_one_changed_byte_anywhere_is_found_and_its_line_named(chain: Chain, tmp_path: Path) -> None:
    path, lines = tmp_path / "audit.log", lines_of(chain, 3)
    whole, rng = b"".join(lines), random.Random(3)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        bad = problem(path, chain)
        assert bad is not None, f"byte {at}"
        number = whole[:at].count(b"\n") + 1
        assert bad[0] == number, f"byte {at} is in line {number}, not in {bad}"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (lambda lines: lines[:2] + lines[3:], 3, "does not follow record 2"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3, "does not follow record 2"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 2, "does not follow record 2"),
        (lambda lines: [*lines[:4], lines[4][:-1]], 5, "does not end"),
        (lambda lines: [*lines[:4], lines[4][:20]], 5, "does not end"),
        (lambda lines: [*lines, b"\n"], 6, "is no line of an audit log"),
        (lambda lines: [*lines, *lines_of(Chain(), 1)], 6, "does not follow record 5"),
        (lambda lines: [*lines, *lines_of(Chain(b"x"), 1)], 6, "needs the secret to be checked"),
    ],
)
def test_lines_that_are_missing_added_or_in_another_order_are_found(
    change: Any, line: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b"".join(change(lines_of(Chain(), 5))))
    found = problem(path, Chain())
    assert found is not None
    assert found[0] == line
    assert words in found[1]


def test_without_the_secret_no_line_can_be_made_that_fits(tmp_path: Path) -> None:
    keyed = Chain(b"a secret")
    lines = lines_of(keyed, 3)
    place = keyed.check(lines[1][:-1], None)[1]
    forged, _ = Chain(b"another").line({"at": "", "event": "call"}, place)
    path = tmp_path / "audit.log"
    path.write_bytes(b"".join([*lines[:2], forged]))
    assert problem(path, keyed) == (3, "was changed: its seal does not fit this secret")
    path.write_bytes(b"".join(lines_of(Chain(), 1)))
    assert problem(path, keyed) == (1, "has a seal without the secret")


def test_a_first_line_may_follow_files_that_are_gone_but_not_the_first_of_all() -> None:
    chain = Chain()
    line, _ = chain.line({"at": ""}, ChainPlace(7, "a" * 64))
    assert chain.check(line[:-1], None)[1].seq == 8
    line, _ = chain.line({"at": ""}, ChainPlace(0, "a" * 64))
    with pytest.raises(BrokenChainError, match="is called the first"):
        chain.check(line[:-1], None)


@given(
    record=st.dictionaries(
        st.text(max_size=5).filter(lambda name: name not in ("seq", "prev", "hmac")),
        st.text(max_size=20) | st.integers(-(2**53), 2**53) | st.none(),
        min_size=1,
        max_size=4,
    )
)
def test_any_text_can_be_recorded(record: dict[str, Any]) -> None:
    chain = Chain(b"k")
    line, place = chain.line(record, START)
    assert line.count(b"\n") == 1
    found, at = chain.check(line[:-1], START)
    assert (at, {name: found[name] for name in record}) == (place, record)
