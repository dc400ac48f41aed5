"""Matrices in fewer bits: how they are stored, and how a batch is multiplied by them."""
