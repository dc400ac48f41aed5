"""API keys that are issued while the router runs, and their stores."""
