"""NVIDIA's Triton Inference Server. Its messages are generated in `backends/kserve`."""
