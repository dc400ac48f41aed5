"""Turns a plan into tokens: requests and sequences, the batch, the runner, sampling and stop strings."""
