"""The audit log: what operators did, and logins that were refused, in a chain that shows every change."""
