"""The SLA file: `parse` reads it, `config` is the result, and each section has a module.

Every reader records all mistakes and returns the valid parts.
"""
