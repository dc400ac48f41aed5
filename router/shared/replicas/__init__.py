"""What several routers tell each other, so that they place prompts like one."""
