"""Checkpoints in GGUF, the form of llama.cpp and Ollama: one file with weights, tokenizer and chat template."""
