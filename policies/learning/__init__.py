"""What is learnt of backends and of answers: small models, fitted to what is seen, usable before anything was."""
