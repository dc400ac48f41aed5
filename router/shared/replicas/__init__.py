"""Messages between routers, so that they place prompts like one."""
