"""Registration of backends that announce themselves."""
