"""Tokens of issuers (JWT, RFC 7519): the keys of each issuer, and the tokens that were verified."""
