"""The network on a GPU: weights and KV on the device, graphs for decoding, and steps that run ahead of the host.

Imported only if a GPU is used. The same code runs on CPU tensors under Triton's interpreter, which is how it is tested.
"""
