"""llama.cpp's server."""
