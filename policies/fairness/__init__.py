"""The fair queue: the order of service between service classes, and between the tenants of a class. Callers pass `now`.

Reasons for virtual time instead of deficit round robin: `docs/decisions/0011-virtual-time-between-tenants.md`.
"""
