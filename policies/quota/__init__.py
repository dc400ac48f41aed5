"""Quotas: limits as meters, the charge of a request, and the ledger that proves the sum."""
