"""Simulates a cluster on a virtual clock: the router's own pipeline and the engine's own scheduler, on a trace."""
