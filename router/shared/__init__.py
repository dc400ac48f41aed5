"""What several routers have in common, in memory, files or Redis."""
