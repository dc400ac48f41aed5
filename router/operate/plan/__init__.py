"""The plan: how many backends the requests of a decision log needed."""
