"""The bundled model: a small checkpoint the project trained itself, its documents, its training and its evaluation.

It answers questions about facts stated in the prompt, so a wrong key-value block, a wrong position or a prefix
leaked from another request shows as a wrong answer.
"""

from __future__ import annotations

from pathlib import Path

NAME = "pointsman-reader"
"""The model's name for clients."""


def weights() -> Path:
    """The folder of the checkpoint, in the Hugging Face format."""
    return Path(__file__).parent / "weights"
