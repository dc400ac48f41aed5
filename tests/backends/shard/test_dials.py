"""Dials of Sampling: each crosses gRPC and the link to shards, and reaches the draw."""

from __future__ import annotations

import pytest

from backends.shard.messages import sampling_of
from policies.nouns import DIALS
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.openai.request import completion_ask
from shards.nouns import DIALS as OF_SHARDS
from shards.nouns import SamplingParams
from shards.wire.translate import sampling_params
from shards.wire.v1 import shard_pb2 as wire


def test_every_dial_has_a_field_in_each_message() -> None:
    assert DIALS.keys() <= set(pb.Sampling.DESCRIPTOR.fields_by_name)
    assert DIALS.keys() <= set(wire.Sampling.DESCRIPTOR.fields_by_name)
    assert DIALS.keys() == {dial.name for dial in OF_SHARDS}


@pytest.mark.parametrize("name", DIALS)
def test_a_dial_goes_from_a_client_to_the_draw(name: str) -> None:
    value = 1 if name == "top_k" else 0.5
    sampling = completion_ask({"model": "m", "prompt": "hi", name: value}, {}).sampling
    assert getattr(sampling_params(sampling_of(sampling, "r")), name) == value


def test_a_shard_takes_a_message_without_dials_for_one_with_all_of_them_off() -> None:
    assert sampling_params(wire.Sampling()) == SamplingParams()
