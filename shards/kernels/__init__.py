"""The GPU kernels, in Triton. Each file holds the meaning in plain torch, then the kernel, then what launches it.

Nothing here is imported where there is no GPU. The same code runs on CPU tensors in Triton's interpreter, which is how
it is tested: TRITON_INTERPRET=1 has to be in the environment before triton is imported.
"""
