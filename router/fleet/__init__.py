"""The backends: discovery, health, load, and estimated cache contents."""
