"""The only package that imports all others: from a client's bytes to a backend and back."""
