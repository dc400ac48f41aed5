"""Keys and values: block keys, who holds which block, what is cached, and the memory itself."""
