import pytest
import torch

from shards.kernels.targets import CHIPS

pytest.importorskip("triton", reason="triton is not installed")


def test_tensors_on_the_cpu_need_the_interpreter() -> None:
    from shards.kernels.launch import gpu_of

    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        gpu_of(torch.device("cpu"))


def test_a_tile_fits_as_often_as_there_is_room_for_it() -> None:
    assert CHIPS["sm_90"].fits(32 * 1024, most=9) == 6
    assert CHIPS["sm_90"].fits(32 * 1024, most=2) == 2
    assert CHIPS["gfx942"].fits(1 << 20, most=2) == 1
