"""What a tenant may use: limits as meters, what a request takes from them, and the ledger that proves the sum."""
