"""The command line; building and starting a router."""
