"""What operators see and do. Nothing that serves a request imports it."""
