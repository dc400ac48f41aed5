"""Keys and values: block keys, the ownership of blocks, the prefix cache, and the memory itself."""
