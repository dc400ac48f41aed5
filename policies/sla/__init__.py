"""The SLA file: `parse` reads it, `config` is what it says, and each section has a file.

Every reader notes all mistakes and returns what is right.
"""
