"""Prompts as the model reads them: chat templates, token ids, tool calls."""
