"""API keys that are issued while the router runs, and where they are kept."""
