"""Tensor parallelism: several processes, each with one part of a network, computed together."""
