"""The sections of the SLA file, one file each. Every reader notes all mistakes and returns what is right."""
