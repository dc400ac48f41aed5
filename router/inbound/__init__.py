"""The protocols that clients speak: read into an Ask, written from Deltas."""
