"""What engines say of their KV caches: nouns that all share, and one decoder for each engine."""
