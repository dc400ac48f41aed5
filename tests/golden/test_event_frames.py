"""Golden frames: what each engine version writes, byte for byte, and what we read in it.

`python -m tests.golden.test_event_frames` writes them anew. A frame that changes is another version, under a new name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.events import sglang, vllm
from backends.events import tensorrt_llm as trtllm
from backends.events.nouns import Batch, Cleared, Removed, Stored, packed
from tests.golden.event_encoders import SGLANG, VLLM, Change, Clear, Drop, Put, tensorrt_llm

FRAMES = Path(__file__).parent / "events"
AT = 1_789_095_808.8378847
BYTES, CHILD = bytes(range(32)), bytes(range(32, 64))

CHANGES: dict[str, list[Change]] = {
    "vllm": [
        Clear(),
        Put((BYTES, CHILD), None, (151644, 872, 198, 9064, 374, 279, 6722, 315), 4, salt="acme"),
        Put((2**64 - 1,), CHILD, (5616, 30, 151645, 198), 4, lora="chat", keys=(("a-picture",),)),
        Put((7,), None, (1, 2, 3, 4), 4, group=1, kind="sliding_window", window=128),
        Drop((BYTES,), group=0),
        Drop((CHILD,), medium="CPU"),
    ],
    "sglang": [
        Clear(),
        Put((11, -12), None, (151644, 872, 198, 9064, 374, 279, 6722, 315), 4, salt="acme"),
        Put((13,), -12, (5616, 30, 151645, 198), 4, medium="CPU_PINNED"),
        Drop((11,)),
        Drop((13,), medium="CPU_PINNED"),
    ],
}
TRT_CHANGES: list[Change] = [
    Clear(),
    Put((101, 102), None, (1, 2, 3, 4, 5, 6, 7, 8), 4),
    Put((103,), 102, (9, 10, 11, 12), 4, keys=((77,),), medium="CPU"),
    Drop((101,)),
]

FIRST = Stored((BYTES, CHILD), None, packed([151644, 872, 198, 9064, 374, 279, 6722, 315]), 4)
SECOND = Stored((2**64 - 1,), CHILD, packed([5616, 30, 151645, 198]), 4, adapter="lora_id:416")
OTHER = Stored((7,), None, packed([1, 2, 3, 4]), 4)
FULL = (
    Cleared(),
    replace(FIRST, salt="acme"),
    replace(SECOND, adapter="chat", extra_keys=(("a-picture",),)),
    replace(OTHER, group=1, window=128),
    Removed((BYTES,), group=0),
    Removed((CHILD,), tier="host"),
)
BARE = (Cleared(), FIRST, SECOND, OTHER, Removed((BYTES,)), Removed((CHILD,)))

SG_FIRST = Stored((11, -12), None, packed([151644, 872, 198, 9064, 374, 279, 6722, 315]), 4)
SG_SECOND = Stored((13,), -12, packed([5616, 30, 151645, 198]), 4, tier="host")
SG_REST = (SG_SECOND, Removed((11,)), Removed((13,), tier="host"))

READ: dict[str, Batch] = {
    "vllm-0.9": Batch(BARE, AT),
    "vllm-0.11": Batch((*BARE[:-1], Removed((CHILD,), tier="host")), AT, rank=1),
    "vllm-0.23": Batch(FULL, AT, rank=1),
    "vllm-0.26": Batch(FULL, AT, rank=1),
    "vllm-map-batch": Batch(FULL, AT, rank=1),
    "vllm-future": Batch(FULL, AT, rank=1, unknown=1),
    "sglang-0.4": Batch((Cleared(), SG_FIRST, replace(SG_SECOND, tier="device"), Removed((11,)), Removed((13,))), AT),
    "sglang-0.5.9": Batch((Cleared(), SG_FIRST, *SG_REST), AT, rank=1),
    "sglang-0.5.18": Batch((Cleared(), replace(SG_FIRST, salt="acme"), *SG_REST), AT, rank=1),
    "sglang-maps": Batch((Cleared(), replace(SG_FIRST, salt="acme"), *SG_REST), AT, rank=1),
}


def written(name: str) -> bytes:
    """The messages of the version called `name`."""
    if name == "tensorrt-llm-1":
        return tensorrt_llm(TRT_CHANGES, first_id=40, rank=1)
    return (VLLM | SGLANG)[name](AT, CHANGES[name.partition("-")[0]], 1)


def frame(name: str) -> bytes:
    return bytes.fromhex((FRAMES / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", [*READ, "tensorrt-llm-1"])
def test_frames_are_what_the_documented_schemas_write(name: str) -> None:
    assert frame(name) == written(name)


@pytest.mark.parametrize("name", READ)
def test_every_version_is_read(name: str) -> None:
    decode = vllm.decode if name in VLLM else sglang.decode
    assert decode(frame(name)) == READ[name]


def test_tensorrt_llm_is_read() -> None:
    events = trtllm.decode(frame("tensorrt-llm-1"))
    assert [(event.seq, event.rank) for event in events] == [(40, 1), (41, 1), (42, 1), (43, 1)]
    group = {"group": 4096, "window": 4096}
    assert [event.events for event in events] == [
        (Cleared(),),
        (
            Stored((101,), None, packed([1, 2, 3, 4]), 4, **group),
            Stored((102,), 101, packed([5, 6, 7, 8]), 4, **group),
        ),
        (
            Stored(
                (103,),
                102,
                packed([9, 10, 11, 12]),
                4,
                tier="host",
                extra_keys=(("0:77", "1:77", "2:77", "3:77"),),
                **group,
            ),
        ),
        (Removed((101,), tier=None, group=4096),),
    ]


if __name__ == "__main__":
    FRAMES.mkdir(exist_ok=True)
    for name in [*READ, "tensorrt-llm-1"]:
        text = written(name).hex()
        lines = [text[at : at + 100] for at in range(0, len(text), 100)]
        (FRAMES / f"{name}.hex").write_text("\n".join(lines) + "\n")
