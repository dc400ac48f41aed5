"""Learned estimates of backends and answers: small models, fitted to observations, with usable priors."""
