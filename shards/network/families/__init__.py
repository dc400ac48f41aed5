"""One file for each family of networks."""
