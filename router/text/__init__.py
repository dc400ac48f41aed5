"""What was said, as the model reads it: chat templates, token ids, calls of tools."""
