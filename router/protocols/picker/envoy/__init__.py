"""The used part of Envoy's external processing, generated from proto/router/protocols/picker/envoy/."""
