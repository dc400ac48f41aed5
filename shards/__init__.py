"""The engine: one process serves one model replica from its paged KV pool. Knows nothing of router or policies."""
