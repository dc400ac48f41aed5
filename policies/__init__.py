"""Decisions: pure functions and the nouns they speak of. No I/O, no clock, no randomness of their own."""
