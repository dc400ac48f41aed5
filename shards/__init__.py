"""The engine: one process serves one model replica from its paged KV pool. Imports nothing from router or policies."""
