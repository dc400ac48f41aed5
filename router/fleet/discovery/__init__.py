"""Which backends a pool has, while that changes: DNS, Kubernetes, and engines that announce themselves."""
