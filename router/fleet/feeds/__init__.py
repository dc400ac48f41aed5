"""Cache events of other engines: one feed for each engine process that publishes."""
