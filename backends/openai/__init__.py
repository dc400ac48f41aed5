"""OpenAI's dialect: its own API, and any server that speaks it."""
