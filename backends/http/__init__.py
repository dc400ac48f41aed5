"""What adapters of HTTP servers share: one client, one shape of backend, and readers of what servers say."""
