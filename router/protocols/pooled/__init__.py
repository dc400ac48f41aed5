"""Embeddings and reranking: answers that are vectors or scores."""
