"""Code generated from `proto/shards/wire/v1`."""
