"""Decisions as pure functions, and their nouns. No I/O, no clock, no own randomness."""
