"""How backends announce themselves to a router."""
