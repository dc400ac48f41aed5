"""What every test finds set, before torch or transformers are imported."""

from __future__ import annotations

import os

# waiting OpenMP threads would spin on cores that other tests need: seen to cost a factor of ten
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
