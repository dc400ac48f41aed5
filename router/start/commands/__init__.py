"""The parts that commands start: a router, several processes, local shards."""
