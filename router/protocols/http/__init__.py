"""HTTP: which paths there are, how bodies come in and answers go out."""
