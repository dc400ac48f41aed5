"""Prefixes that are computed ahead of the questions, and kept for a time."""
