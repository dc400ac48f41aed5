"""Structured output: what an answer must be, compiled once, and followed token by token."""
