"""The simulation's event loop, where tests look for it: hours pass in milliseconds."""

from simulation.virtual_time import VirtualTimeLoop, run_virtually

__all__ = ["VirtualTimeLoop", "run_virtually"]
