"""Anthropic's messages as a server answers them: Anthropic's own, and any that speaks the dialect."""
