"""State that several routers share, in memory, files or Redis."""
