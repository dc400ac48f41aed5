"""Which backend is believed to hold which blocks: the prefix index, and estimates for backends without events."""
