"""What clients get for their tokens: one table for every protocol, with an issuer on this machine.

`docs/security.md` has the same table.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from policies.errors import ConfigError
from policies.nouns import Decision, Outcome, Request
from policies.sla.config import Config
from policies.sla.parse import parse
from router.call.observer import Account
from router.identity.issuers import KnownIssuer
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.grpc.v1.inference_pb2_grpc import InferenceStub
from router.start.app import Router
from tests.router.identity.local_issuer import LocalIssuer, a_key, a_local_issuer, an_rsa_key, jwk_of, pem_of, signed
from tests.router.parts import CHAT, MODEL, Client, ScriptedBackend, a_chat, a_client, a_router
from tests.router.protocols.picker.parts import a_gateway as a_picking_gateway
from tests.router.protocols.picker.parts import chat as picked_chat
from tests.router.start.test_reload import Paper

ALGORITHMS = ("RS256", "ES256", "EdDSA", "PS256")
RULE = "{when: {claims: {groups: ml}}, tenant: acme, team: search, user: {claim: sub}}"
FILE = """
tenants:
  acme: {teams: {search: {limits: {requests_per_minute: 1000}}}}
  labs: {keys: ["sha256:%s"]}
pools: {own: {kind: fake, model: tiny}}
server: {http: "127.0.0.1:0", grpc: "127.0.0.1:0", drain: 5s}
""" % ("a" * 64)


def a_file(issuer: LocalIssuer, *rules: str, **settings: Any) -> Config:
    return parse(FILE + issuer.section(*(rules or (RULE,)), **settings))


@asynccontextmanager
async def a_trusting_router(*rules: str, **settings: Any) -> AsyncIterator[tuple[LocalIssuer, Router, Client]]:
    async with (
        a_local_issuer(*ALGORITHMS) as issuer,
        a_router(ScriptedBackend(), config=a_file(issuer, *rules, **settings)) as router,
        a_client(router) as client,
    ):
        yield issuer, router, client


def known(router: Router) -> KnownIssuer:
    assert router.gateway.identities.tokens is not None
    [issuer] = router.gateway.identities.tokens.issuers.known()
    return issuer


async def answered(client: Client, token: str | None) -> tuple[int, str, str, str | None]:
    async with client.post(CHAT, a_chat(), key=token) as reply:
        body = await reply.json()
        error = body.get("error", {})
        return reply.status, error.get("code", ""), error.get("message", ""), reply.headers.get("WWW-Authenticate")


@dataclass
class Ended:
    """A listener of telemetry that keeps the end users of calls."""

    users: list[str | None] = field(default_factory=list)

    def decided(self, request: Request, decision: Decision) -> None:
        pass

    def missed(self, service_class: str, step: str) -> None:
        pass

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:
        self.users.append(account.user)


Make = Callable[[LocalIssuer], str]


def _header(**members: Any) -> Make:
    return lambda issuer: issuer.token(header=members, groups=["ml"])


def _claims(**claims: Any) -> Make:
    return lambda issuer: issuer.token(**{"groups": ["ml"], **claims})


def _timed(claim: str, after_s: int) -> Make:
    """A token with this moment in `claim`, in seconds from now."""
    return lambda issuer: issuer.token(groups=["ml"], **{claim: int(time.time()) + after_s})


def _good(issuer: LocalIssuer) -> dict[str, Any]:
    return issuer.claims(groups=["ml"])


def _confused(issuer: LocalIssuer) -> str:
    """Signed with HS256, and the public key in PEM as the shared secret."""
    return signed({"alg": "HS256", "kid": "k0"}, _good(issuer), pem_of(issuer.keys["k0"][1]))


def _confused_as_rsa(issuer: LocalIssuer) -> str:
    """The same bytes, and a header that names the right algorithm."""
    return signed({"alg": "RS256", "kid": "k0"}, _good(issuer), pem_of(issuer.keys["k0"][1]))


def _unsigned(algorithm: str) -> Make:
    return lambda issuer: signed({"alg": algorithm, "kid": "k0"}, _good(issuer), None)


def _forged(issuer: LocalIssuer) -> str:
    return signed({"alg": "RS256", "kid": "k0"}, _good(issuer), an_rsa_key(9))


def _with_its_own_key(issuer: LocalIssuer) -> str:
    own = an_rsa_key(9)
    return signed({"alg": "RS256", "kid": "k0", "jwk": jwk_of(own)}, _good(issuer), own)


def _raised(issuer: LocalIssuer) -> str:
    """A good token, with other claims put into it."""
    head, _, tail = issuer.token(groups=["ml"]).split(".")
    return f"{head}.{signed({}, issuer.claims(groups=['ml'], sub='admin'), None).split('.')[1]}.{tail}"


ACCEPTED: dict[str, Make] = {
    "RS256": lambda issuer: issuer.token("k0", groups=["ml"]),
    "ES256": lambda issuer: issuer.token("k1", groups=["ml"]),
    "EdDSA": lambda issuer: issuer.token("k2", groups=["ml"]),
    "PS256": lambda issuer: issuer.token("k3", groups=["ml"]),
    "one of several audiences": _claims(aud=["other", "pointsman"]),
    "expired for less than the skew": _timed("exp", -30),
    "valid in less than the skew": _timed("nbf", 30),
    "an access token by its type": _header(typ="at+jwt"),
}

REFUSED: dict[str, tuple[Make, int, str]] = {
    "expired": (_timed("exp", -61), 401, "the token has expired"),
    "without expiry": (_claims(exp=None), 401, "the token has no expiry"),
    "expiry is a text": (_claims(exp="9999999999"), 401, "a time in the token is not a number of seconds"),
    "not valid yet": (_timed("nbf", 120), 401, "the token is not valid yet"),
    "for another audience": (_claims(aud="other"), 401, "the token is for another audience"),
    "without audience": (_claims(aud=None), 401, "the token is for another audience"),
    "of another issuer": (_claims(iss="https://login.example.com"), 401, "the token's issuer is not trusted here"),
    "without issuer": (_claims(iss=None), 401, "the token's issuer is not trusted here"),
    "alg none": (_unsigned("none"), 401, "the token's signature algorithm is not allowed"),
    "alg NoNe": (_unsigned("NoNe"), 401, "the token's signature algorithm is not allowed"),
    "without signature": (_unsigned("RS256"), 401, "the token's signature is not valid"),
    "HS256 with the public key": (_confused, 401, "the token's signature algorithm is not allowed"),
    "HMAC called RS256": (_confused_as_rsa, 401, "the token's signature is not valid"),
    "signed with another key": (_forged, 401, "the token's signature is not valid"),
    "with its own key in its header": (_with_its_own_key, 401, "the token's signature is not valid"),
    "claims exchanged": (_raised, 401, "the token's signature is not valid"),
    "a key of another algorithm": (
        _header(alg="ES256"),
        401,
        "the token is signed with a key that its issuer does not",
    ),
    "an algorithm that is not allowed": (_header(alg="RS512"), 401, "the token's signature algorithm is not allowed"),
    "an unknown key": (_header(kid="k9"), 401, "the token is signed with a key that its issuer does not publish"),
    "a critical header": (_header(crit=["exp"]), 401, "the token's header has members that are not supported"),
    "no JSON inside": (lambda _: "eyJ.eyJ.abc", 401, "the token cannot be read"),
    "a list for claims": (lambda _: signed({"alg": "RS256"}, [1], None), 401, "the token cannot be read"),
    "too long": (_claims(more="x" * 20_000), 401, "the token is longer than 16,384 bytes"),
    "no rule matches": (_claims(groups=["sales"]), 403, "no rule of this router gives the token a tenant"),
    "no key and no token": (lambda _: "", 401, "no API key was sent"),
    "an unknown key of ours": (lambda _: "pm_unknown", 401, "the API key is not known"),
}


@pytest.mark.parametrize("name", ACCEPTED)
async def test_a_good_token_is_accepted(name: str) -> None:
    async with a_trusting_router() as (issuer, _, client):
        assert (await answered(client, ACCEPTED[name](issuer)))[0] == 200


@pytest.mark.parametrize("name", REFUSED)
async def test_any_other_is_refused_with_a_reason_and_without_what_is_in_it(name: str) -> None:
    make, status, words = REFUSED[name]
    async with a_trusting_router() as (issuer, _, client):
        token = make(issuer)
        got, code, message, challenge = await answered(client, token or None)
    assert got == status, message
    assert message.startswith(words)
    assert message.endswith(")"), "no hint"
    assert code == {401: "invalid_api_key", 403: "permission_denied"}[status]
    assert challenge is not None
    assert challenge.startswith('Bearer realm="pointsman"')
    error = {401: "invalid_token", 403: "insufficient_scope"}[status]
    assert (f'error="{error}"' in challenge) == bool(token), "RFC 6750, 3.1: no error code without a credential"
    for secret in ("u-17", "sales", issuer.url, *filter(None, token.split("."))):
        assert len(secret) < 4 or secret not in message + challenge


async def test_every_dialect_grpc_and_the_picker_refuse_alike() -> None:
    async with a_local_issuer("RS256") as issuer:
        config = a_file(issuer)
        good, expired = issuer.token(groups=["ml"]), issuer.token(groups=["ml"], exp=int(time.time()) - 100)
        async with a_router(ScriptedBackend(), config=config) as router, a_client(router) as client:
            message = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
            for path, body in ((CHAT, a_chat()), ("/v1/messages", message), ("/v1/completions", {"prompt": "hi"})):
                assert (await client.answer(path, {"model": MODEL, **body}, key=good))[0] == 200
                status, refused = await client.answer(path, {"model": MODEL, **body}, key=expired)
                assert (status, refused["error"]["message"]) == (
                    401,
                    "the token has expired (get a new token from its issuer)",
                )
            status, refused = await client.answer("/v1/messages", message, key=None, headers={"x-api-key": expired})
            assert (status, refused["type"], refused["error"]["type"]) == (401, "error", "authentication_error")
            async with client.get("/v1/models", key=good) as reply:
                assert reply.status == 200
            assert router.grpc_address is not None
            async with grpc.aio.insecure_channel(router.grpc_address) as channel:
                stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
                request = pb.GenerateRequest(
                    model=MODEL, chat=pb.Messages(messages=[pb.Message(role="user", content="hi")])
                )
                reply = await stub.Complete(request, metadata=(("authorization", f"Bearer {good}"),))
                assert reply.placement.tenant == "acme"
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.Complete(request, metadata=(("authorization", f"Bearer {expired}"),))
                assert failed.value.code() == grpc.StatusCode.UNAUTHENTICATED
                token = issuer.token(groups=["sales"])
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.ListModels(pb.ListModelsRequest(), metadata=(("authorization", f"Bearer {token}"),))
                assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED
        picking = replace(config, server=replace(config.server, picker="127.0.0.1:0"))
        async with a_picking_gateway(config=picking) as (envoy, _):
            headers = {"content-type": "application/json"}
            answer = await picked_chat(envoy, headers={**headers, "authorization": f"Bearer {good}"})
            assert answer.status == 200
            answer = await picked_chat(envoy, headers={**headers, "authorization": f"Bearer {expired}"})
            assert (answer.status, b"the token has expired" in answer.body) == (401, True)
            assert "invalid_token" in answer.headers["www-authenticate"]


async def test_keys_and_tokens_work_side_by_side() -> None:
    async with a_local_issuer("RS256") as issuer:
        text = FILE.replace("a" * 64, hashlib.sha256(b"labs-key").hexdigest()) + issuer.section(RULE)
        async with a_router(config=parse(text)) as router, a_client(router) as client:
            tenants = []
            for key in ("labs-key", issuer.token(groups=["ml"])):
                async with client.post(CHAT, a_chat(), key=key) as reply:
                    tenants.append(reply.headers["X-Pointsman-Tenant"])
    assert tenants == ["labs", "acme"]


async def test_a_token_of_a_key_that_was_just_added_waits_for_it() -> None:
    async with a_trusting_router() as (issuer, router, client):
        await answered(client, issuer.token(groups=["ml"]))
        known(router)._asked_at = float("-inf")  # ten seconds have passed
        fetches = issuer.fetches
        issuer.add("new", "RS256", 5)
        assert (await answered(client, issuer.token("new", groups=["ml"])))[0] == 200
        assert issuer.fetches == fetches + 1
        # and only one fetch in ten seconds follows, whatever is asked
        tokens = [issuer.token(header={"kid": f"guess{number}"}, groups=["ml"]) for number in range(20)]
        assert {status for status, *_ in await asyncio.gather(*(answered(client, token) for token in tokens))} == {401}
        assert issuer.fetches == fetches + 1


async def test_a_key_that_its_issuer_withdrew_ends_the_tokens_that_it_signed() -> None:
    async with a_trusting_router() as (issuer, router, client):
        old = issuer.token("k0", groups=["ml"])
        assert (await answered(client, old))[0] == 200
        del issuer.keys["k0"]
        assert await known(router).fetch()
        assert (await answered(client, old))[:2] == (401, "invalid_api_key")
        assert (await answered(client, issuer.token("k1", groups=["ml"])))[0] == 200


async def test_an_issuer_that_is_away_keeps_its_known_keys_working() -> None:
    async with a_trusting_router() as (issuer, router, client):
        assert (await answered(client, issuer.token("k0", groups=["ml"])))[0] == 200
        issuer.fails = True
        assert not await known(router).fetch()
        # a token that was never seen before, of each key that is cached
        for kid in list(issuer.keys):
            assert (await answered(client, issuer.token(kid, groups=["ml"], jti=kid)))[0] == 200
        assert known(router).trouble == f"{issuer.url}/.well-known/openid-configuration answered with status 503"


async def test_an_issuer_that_was_never_reached_is_no_fault_of_the_client() -> None:
    async with a_local_issuer("RS256") as issuer:
        issuer.fails = True
        async with a_router(config=a_file(issuer)) as router, a_client(router) as client:
            async with client.post(CHAT, a_chat(), key=issuer.token(groups=["ml"])) as reply:
                assert (reply.status, reply.headers["Retry-After"]) == (503, "10")
                message = (await reply.json())["error"]["message"]
            assert message == "tokens of this issuer cannot be verified now (try again in a moment)"
            issuer.fails = False
            assert await known(router).fetch()
            assert (await answered(client, issuer.token(groups=["ml"])))[0] == 200


async def test_keys_may_stand_in_a_file(tmp_path: Path) -> None:
    key = a_key("ES256")
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [jwk_of(key, kid="f")]}))
    issuer = LocalIssuer("https://login.example.com", {"f": ("ES256", key)})
    async with a_router(config=a_file(issuer, jwks=str(path))) as router, a_client(router) as client:
        assert (await answered(client, issuer.token(groups=["ml"])))[0] == 200


async def test_a_token_has_the_classes_models_and_end_user_of_its_rule() -> None:
    rules = (
        "{when: {claims: {role: batch}}, tenant: acme, classes: [standard], models: [other], user: {claim: sub}}",
        "{tenant: {claim: org}, user: {claim: sub}}",
    )
    async with a_trusting_router(*rules) as (issuer, router, client):
        status, code, *_ = await answered(client, issuer.token(role="batch"))
        assert (status, code) == (404, "model_not_found")
        router.telemetry.flush()
        ended = Ended()
        router.telemetry.listen(ended)
        assert (await client.answer(CHAT, a_chat(user="another"), key=issuer.token(org="acme")))[0] == 200
        router.telemetry.flush()
        # what the issuer says counts, not what the client says
        assert ended.users == ["u-17"]
        assert (await answered(client, issuer.token(org="nowhere")))[2].startswith("the token names a tenant that is")
        assert (await answered(client, issuer.token(org=["acme", "labs"])))[0] == 403


async def test_a_changed_file_counts_for_tokens_that_were_seen_before() -> None:
    async with a_trusting_router() as (issuer, router, client):
        token = issuer.token(groups=["ml"])
        assert (await answered(client, token))[0] == 200
        other = RULE.replace("ml", "sales")
        router.gateway.config = a_file(issuer, other)
        assert (await answered(client, token))[0] == 403


async def test_forged_tokens_use_up_what_an_address_may_send() -> None:
    async with a_local_issuer("RS256") as issuer:
        config = a_file(issuer)
        config = replace(config, server=replace(config.server, stranger_requests=1))
        async with a_router(config=config) as router, a_client(router) as client:
            statuses = [(await answered(client, _forged(issuer)))[0] for _ in range(12)]
            assert statuses[:9] == [401] * 9
            assert 429 in statuses
            assert (await answered(client, issuer.token(groups=["ml"])))[0] == 200


async def test_an_issuer_that_a_changed_file_adds_is_trusted_without_a_restart() -> None:
    async with a_local_issuer("ES256") as issuer:
        keyed = FILE.replace("acme: {", f"acme: {{keys: ['sha256:{'b' * 64}'], ")
        paper = Paper(keyed)
        contents = paper.read()
        async with Router(contents.config, backends=lambda _: [ScriptedBackend()], file=contents) as router:
            assert await router.wait_until_reached(5)
            assert router.gateway.identities.tokens is None
            assert router.reloader is not None
            async with a_client(router) as client:
                token = issuer.token(groups=["ml"])
                assert (await answered(client, token))[2].startswith("the API key is not known")
                paper.text = keyed + issuer.section(RULE)
                assert await router.reloader.reload() is None
                assert await known(router).fetch()
                assert (await answered(client, token))[0] == 200
                paper.text = keyed
                assert await router.reloader.reload() is None
                assert (await answered(client, token))[2].startswith("the token's issuer is not trusted here")


async def test_the_certificates_of_an_issuer_are_a_mistake_of_the_file_if_they_cannot_be_used(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.crt")
    issuer = LocalIssuer("https://login.example.com")
    with pytest.raises(ConfigError, match="TLS of issuer corp: cannot read"):
        Router(a_file(issuer, tls={"ca": missing}), backends=lambda _: [ScriptedBackend()])
