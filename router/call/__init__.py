"""The life of a request, from what the client asks to the end of its answer."""
