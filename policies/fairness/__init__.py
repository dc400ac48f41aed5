"""The fair queue: who is served next, between service classes and between the tenants of one. `now` is an argument.

Why it is virtual time and not plain deficit round robin: `docs/decisions/0011-virtual-time-between-tenants.md`.
"""
