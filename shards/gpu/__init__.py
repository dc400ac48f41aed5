"""The network on a GPU: weights and KV on the device, graphs for decoding, and steps that run ahead of the host.

Imported only where a GPU is used. The same code runs on CPU tensors where Triton interprets, which is how it is tested.
"""
