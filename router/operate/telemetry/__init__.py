"""Metrics, traces, the decision log and log lines."""
