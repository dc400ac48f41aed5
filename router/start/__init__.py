"""The command line, and the parts of a router put together and started."""
