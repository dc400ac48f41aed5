"""Clients of a router for the command line: a chat in the terminal, and a benchmark."""
