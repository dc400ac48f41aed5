"""The admin port: the calls of operators and their programs."""
