"""TLS of every port and connection: certificates that are read again when they change, pins, and clear refusals."""
