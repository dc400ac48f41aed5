"""What the commands start: a router, several processes, local shards."""
