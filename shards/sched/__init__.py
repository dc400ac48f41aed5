"""Admission and the plan of the next step: pure decisions. Torch-free."""
