"""Everything that can generate, behind one Protocol: one adapter per file."""
