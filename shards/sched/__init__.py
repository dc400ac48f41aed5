"""What is admitted and what the next step computes: pure decisions. Torch-free."""
