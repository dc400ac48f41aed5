"""The parts of a call: who asks, whether it may run, where it waits, how it is carried, how it ended."""
