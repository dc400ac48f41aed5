"""HTTP/1.1 on both sides of the router: a server for clients and a client for backends, on httptools."""
