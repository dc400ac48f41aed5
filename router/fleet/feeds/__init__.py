"""What foreign engines' caches hold, from their own events: one feed for each engine process that publishes."""
