"""Generated from `proto/router/protocols/grpc/v1`."""
