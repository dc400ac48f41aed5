"""The protocols that clients and gateways speak."""
