"""Where quotas are kept: in this process, or in a Redis that several routers share."""
