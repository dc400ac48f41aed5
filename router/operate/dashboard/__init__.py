"""The dashboard: what the router remembers of its last minute, as one snapshot, a page and a terminal's frame."""
