"""Parts of `benchmarks/blending.py`: a model that has to join documents, its documents and its training."""
