"""The endpoint picker: names an endpoint to a gateway for each request, and follows the answer."""
