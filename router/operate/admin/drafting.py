"""The admin port's calls for the SLA file: drafts of it, its earlier versions, and changes of it."""

from __future__ import annotations

from http1.request import Request, Response
from policies.errors import InvalidRequest
from policies.suggest import did_you_mean
from router.operate.config_desk import ConfigDesk
from router.operate.dashboard.routes import json_reply, query_of, read_json
from router.protocols.http.body import read_body
from router.protocols.http.routes import Routes

MOST_BYTES = 2**20
"""Of an SLA file."""

_YAML = {"Content-Type": "application/yaml; charset=utf-8"}


class Drafting:
    """Answers operators' calls for the SLA file. Without a `desk` the router has no file that could be changed."""

    def __init__(self, desk: ConfigDesk | None) -> None:
        self._desk = desk

    def __repr__(self) -> str:
        return f"<Drafting at {self._desk!r}>"

    def add_to(self, routes: Routes) -> None:
        """Add the calls to `routes`."""
        routes.add("GET", "/admin/config/file", self.text)
        routes.add("POST", "/admin/config/drafts", self.put)
        routes.add("GET", "/admin/config/drafts", self.drafts)
        routes.add("GET", "/admin/config/drafts/{version}", self.report)
        routes.add("DELETE", "/admin/config/drafts/{version}", self.drop)
        routes.add("GET", "/admin/config/drafts/{version}/text", self.draft_text)
        routes.add("POST", "/admin/config/drafts/{version}/apply", self.apply)
        routes.add("GET", "/admin/config/history", self.history)
        routes.add("GET", "/admin/config/history/{version}", self.kept_text)
        routes.add("POST", "/admin/config/rollback", self.roll_back)

    async def text(self, _: Request) -> Response:
        """The file's text."""
        return _yaml(await self._file().text())

    async def put(self, request: Request) -> Response:
        """Keep the body as a draft."""
        raw = await read_body(request, MOST_BYTES, too_large="an SLA file has at most 1 MiB")
        try:
            sent = raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the draft is no text in UTF-8: {error}") from error
        if not sent.strip():
            raise InvalidRequest("the draft is empty", hint="send the text of an SLA file as the body")
        return json_reply(await self._file().put(sent), 201)

    async def drafts(self, _: Request) -> Response:
        """List the drafts."""
        return json_reply({"drafts": self._file().drafts()})

    async def report(self, _: Request, version: str) -> Response:
        """A draft compared with the file in effect."""
        return json_reply(await self._file().report(version))

    async def draft_text(self, _: Request, version: str) -> Response:
        """A draft's text."""
        return _yaml(self._file().draft_text(version))

    async def drop(self, _: Request, version: str) -> Response:
        """Forget a draft."""
        self._file().drop(version)
        return json_reply({"version": version, "dropped": True})

    async def apply(self, request: Request, version: str) -> Response:
        """Have a draft in the file."""
        for_restart = _is_for_restart(request)
        return json_reply(await self._file().apply(version, expected=_expected(request), for_restart=for_restart))

    async def history(self, _: Request) -> Response:
        """List earlier versions."""
        return json_reply({"versions": await self._file().history()})

    async def kept_text(self, _: Request, version: str) -> Response:
        """An earlier version's text."""
        return _yaml(await self._file().kept_text(version))

    async def roll_back(self, request: Request) -> Response:
        """Have an earlier version in the file."""
        body = await read_json(request, may_be_empty=True)
        if unknown := sorted(body.keys() - {"version"}):
            hint = did_you_mean(unknown[0], ("version",)) or "known: version"
            raise InvalidRequest(f"unknown field '{unknown[0][:80]}' for a rollback", hint=hint, param=unknown[0][:80])
        version = body.get("version")
        if version is not None and not isinstance(version, str):
            raise InvalidRequest("version must be text", hint="GET /admin/config/history lists them", param="version")
        for_restart = _is_for_restart(request)
        return json_reply(await self._file().roll_back(version, expected=_expected(request), for_restart=for_restart))

    def _file(self) -> ConfigDesk:
        if self._desk is None:
            raise InvalidRequest("this router runs without an SLA file", hint="use: pointsman up sla.yaml")
        return self._desk


def _yaml(text: str) -> Response:
    return Response(200, text.encode(), _YAML)


def _expected(request: Request) -> str | None:
    """The version in `If-Match` (RFC 9110, 13.1.1); None without one."""
    asked = request.headers.get("if-match", "").strip().removeprefix("W/").strip('"')
    return None if asked in ("", "*") else asked


def _is_for_restart(request: Request) -> bool:
    wanted = query_of(request).get("restart", "false")
    if wanted not in ("true", "false"):
        raise InvalidRequest("restart must be true or false", param="restart")
    return wanted == "true"
