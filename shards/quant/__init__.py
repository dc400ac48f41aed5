"""Matrices in fewer bits: their storage, and their multiplication with a batch."""
