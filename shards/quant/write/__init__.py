"""Quantised checkpoints from checkpoints in floating point: `pointsman quantize`."""
