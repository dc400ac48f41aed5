"""The dashboard: the router's last minute as one snapshot, shown on a web page and in a terminal."""
