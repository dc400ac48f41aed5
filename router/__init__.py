"""The only package that wires things together: from a client's bytes to a backend and back."""
