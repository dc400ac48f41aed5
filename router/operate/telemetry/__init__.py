"""What the router tells of itself: metrics, traces, decisions, logs."""
