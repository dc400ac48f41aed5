"""The network: what a step's tokens go through on their way to logits."""
