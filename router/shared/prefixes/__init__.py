"""Pinned prefixes: computed ahead of requests, and kept for a time."""
