"""Which backend is believed to hold which blocks: the prefix index, and what is guessed of those that tell nothing."""
