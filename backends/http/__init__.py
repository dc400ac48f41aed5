"""Parts that adapters of HTTP servers share: one client, one base class, and readers of answers."""
