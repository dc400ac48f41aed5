"""KServe v2 as Triton speaks it, generated from proto/backends/kserve/inference.proto."""
