"""The admin port: what operators and their programs call."""
