"""Engines' reports about their KV caches: shared nouns, and one decoder for each engine."""
