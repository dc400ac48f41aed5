"""The operators' side: admin port, dashboard, telemetry. Nothing that serves a request imports it."""
