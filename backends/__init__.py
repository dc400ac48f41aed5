"""Everything that can generate, behind one Protocol: one adapter for each kind, in a file or a folder of its own."""
