"""Envoy's external processing, as far as it is needed here, generated from proto/router/protocols/picker/envoy/."""
