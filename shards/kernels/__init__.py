"""The GPU kernels, in Triton. Each file holds a reference in plain torch, then the kernel, then its launcher.

Imported only if there is a GPU. The same code runs on CPU tensors in Triton's interpreter, which is how it is tested:
TRITON_INTERPRET=1 must be in the environment before triton is imported.
"""
