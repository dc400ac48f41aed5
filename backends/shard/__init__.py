"""Our own engine: one link to each shard, and every request's answer from it."""
