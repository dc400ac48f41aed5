"""What the command line starts: a router, several of them, and shards beside it on one machine."""
