"""Hugging Face's Text Generation Inference."""
