"""The link between a router and a shard: messages, their limits, and translation on both ends. Torch-free."""
