"""Structured output: a grammar is compiled once, and each answer follows it token by token."""
