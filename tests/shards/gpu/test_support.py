from __future__ import annotations

from pathlib import Path

import pytest

from shards.gpu.support import require_gpu_support
from shards.network.config_file import read_config
from shards.network.errors import UnsupportedCheckpoint
from tests.shards.tiny_checkpoints import save_checkpoint


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss", "glm4 moe", "mixtral"])
def test_networks_with_kernels_are_taken(tmp_path: Path, kind: str) -> None:
    save_checkpoint(tmp_path, kind)
    require_gpu_support(read_config(tmp_path))


def test_networks_without_kernels_are_refused_with_a_way_out(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "deepseek v3")
    with pytest.raises(UnsupportedCheckpoint) as caught:
        require_gpu_support(read_config(tmp_path))
    assert caught.value.message == "DeepseekV3ForCausalLM has latent attention, which shards compute on CPUs only"
    assert "--device cpu" in caught.value.hint
