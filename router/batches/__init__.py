"""Batches: jobs of many requests, which run in spare capacity."""
