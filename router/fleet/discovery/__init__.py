"""Sources of backends that change at run time: DNS, Kubernetes, and backends that announce themselves."""
