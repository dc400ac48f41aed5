"""Pointsman's own gRPC service."""
