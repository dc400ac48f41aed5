"""Generated from `proto/router/inbound/v1`."""
