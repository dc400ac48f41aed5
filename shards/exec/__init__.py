"""A plan becomes tokens: requests and sequences, the batch, the runner, sampling and stop strings."""
