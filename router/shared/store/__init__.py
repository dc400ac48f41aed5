"""Stores of quotas: in this process, or in a Redis that several routers share."""
