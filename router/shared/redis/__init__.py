"""Redis or Valkey as all of the shared parts use it: connections, their faults, scripts."""
