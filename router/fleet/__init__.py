"""The backends: which there are, how well they do, and what they hold."""
