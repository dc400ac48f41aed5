"""The calls of the admin port: the role that each needs, and whether it is recorded in the audit log. One table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from http1.request import Request
from policies.roles import OperatorRole
from router.operate.dashboard.routes import PAGE, query_of

_VIEWER, _OPERATOR, _OWNER = OperatorRole.VIEWER, OperatorRole.OPERATOR, OperatorRole.OWNER


@dataclass(frozen=True, slots=True)
class AdminCall:
    """One call. It needs `role` (None: no key either), or that of a word in a query parameter, if it is higher.

    A call that `changes` something is recorded.
    """

    role: OperatorRole | None
    changes: bool = False
    parameters: Mapping[str, Mapping[str, OperatorRole]] = field(default_factory=dict)

    def role_for(self, request: Request) -> OperatorRole:
        """The role that `request` needs."""
        if not self.parameters:
            return self.role or _VIEWER
        query = query_of(request)
        words = [
            (roles, word.strip()) for name, roles in self.parameters.items() for word in query.get(name, "").split(",")
        ]
        return max([self.role or _VIEWER, *(roles[word] for roles, word in words if word in roles)])


_READ = AdminCall(_VIEWER)
_USAGE = AdminCall(_VIEWER, parameters={"by": {"key": _OPERATOR, "user": _OPERATOR}})
_BUDGETS = AdminCall(_VIEWER, parameters={"by": {"key": _OPERATOR}})
_RUN = AdminCall(_OPERATOR, changes=True)
_OWN = AdminCall(_OWNER, changes=True)
_BACKEND = AdminCall(_OPERATOR)
"""Calls of backends that announce themselves every few seconds; the router's log has those that join and leave."""

CALLS: Mapping[str, AdminCall] = {
    "GET /": AdminCall(None),
    "GET /metrics": _READ,
    "GET /admin/audit": AdminCall(_OWNER),
    "GET /admin/batches": _READ,
    "GET /admin/budgets": _BUDGETS,
    "GET /admin/config": _READ,
    "GET /admin/config/drafts": AdminCall(_OPERATOR),
    "POST /admin/config/drafts": _RUN,
    "GET /admin/config/drafts/{version}": AdminCall(_OPERATOR),
    "DELETE /admin/config/drafts/{version}": _RUN,
    "GET /admin/config/drafts/{version}/text": AdminCall(_OPERATOR),
    "POST /admin/config/drafts/{version}/apply": _OWN,
    "GET /admin/config/file": AdminCall(_OPERATOR),
    "GET /admin/config/history": AdminCall(_OPERATOR),
    "GET /admin/config/history/{version}": AdminCall(_OPERATOR),
    "POST /admin/config/rollback": _OWN,
    "GET /admin/decisions/{number}": _READ,
    "GET /admin/diagnosis": _READ,
    "GET /admin/mirrors": _READ,
    "GET /admin/prefixes": _READ,
    "GET /admin/snapshot": _READ,
    "GET /admin/splits": _READ,
    "GET /admin/tenants/{tenant}/keys": AdminCall(_OPERATOR),
    "GET /admin/usage": _USAGE,
    "GET /admin/usage.csv": _USAGE,
    "GET /admin/usage.focus.csv": AdminCall(_OPERATOR),
    "POST /admin/batches/{name}/cancel": _RUN,
    "POST /admin/explain": _READ,
    "POST /admin/reload": _RUN,
    "POST /admin/splits/restore": _RUN,
    "POST /admin/tenants/{tenant}/keys": _OWN,
    "POST /admin/tenants/{tenant}/keys/{id}/rotate": _OWN,
    "PATCH /admin/backends/{name:path}": _RUN,
    "PATCH /admin/tenants/{tenant}/keys/{id}": _OWN,
    "DELETE /admin/tenants/{tenant}/cache": _RUN,
    "DELETE /admin/tenants/{tenant}/keys/{id}": _OWN,
    "GET /backends/registered": _READ,
    "POST /backends/register": _BACKEND,
    "POST /backends/unregister": _BACKEND,
    "GET /nodes/status": _READ,
    "POST /nodes/add": _BACKEND,
    "POST /nodes/remove": _BACKEND,
    "GET /test_connection": _BACKEND,
    "POST /get_worker_address": _BACKEND,
    "POST /list_language_models": _BACKEND,
    "POST /list_models": _BACKEND,
    "POST /list_multimodal_models": _BACKEND,
    "POST /receive_heart_beat": _BACKEND,
    "POST /refresh_all_workers": _BACKEND,
    "POST /register_worker": _BACKEND,
    "POST /worker_get_status": _BACKEND,
}
"""Calls by method and path. A new call without an entry is for owners alone."""

_FILES = AdminCall(None)
_UNLISTED = _OWN


def call_of(method: str, path: str) -> AdminCall:
    """The call of this method at this path, as it is in the routes."""
    if method == "GET" and (path == PAGE or path.startswith(f"{PAGE}/")):
        return _FILES
    return CALLS.get(f"{method} {path}", _UNLISTED)
