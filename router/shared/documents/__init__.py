"""Document sets: documents that a tenant stores, names in its requests, and has computed ahead of them."""
