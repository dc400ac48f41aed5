"""Embeddings and reranking: answers of vectors or scores."""
