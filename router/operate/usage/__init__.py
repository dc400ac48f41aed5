"""What tenants used: counted by the hour, kept in a journal first and in a database then."""
