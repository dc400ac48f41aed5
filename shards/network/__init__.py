"""The network: computes logits from a step's tokens."""
