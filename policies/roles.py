"""What an operator may do: three roles, each with the rights of those below it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class OperatorRole(IntEnum):
    """A viewer reads, an operator also changes how requests run, an owner also changes keys."""

    VIEWER = 1
    OPERATOR = 2
    OWNER = 3

    def __str__(self) -> str:
        return self.name.lower()


ROLES = {str(role): role for role in OperatorRole}
"""Roles by the name that files use."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator with a `role`. `name` is for records; `by` is what it showed: a key, a token, or nothing here."""

    name: str
    role: OperatorRole = OperatorRole.OWNER
    by: str = "key"
