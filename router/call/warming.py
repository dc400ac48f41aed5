"""Computing a prefix on a backend: a call like any other, without a reader of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from policies.errors import BackendFailed, InvalidRequest
from policies.explain import Explanation
from policies.nouns import Capability, Delta, Sampling, Tenant
from policies.quota.budget import Standing
from router.ask import Ask
from router.call.bodies import Held
from router.call.caller import Placement
from router.call.gateway import Gateway
from router.call.identify import Identity, on_behalf_of
from router.call.pipeline import serve
from router.shared.prefixes.warmer import Measure, Warmed
from shards.kv.keys import BLOCK_TOKENS

_BYTES_OF_A_TOKEN, _BYTES_BESIDE = 64, 64 * 2**10
"""Of the body of a prefix, which is remembered for as long as the prefix is kept: its tenant's limit is in tokens."""


class GatewayWarmer:
    """Warms through `gateway()`, by its rules, policies, quotas and queue."""

    def __init__(self, gateway: Callable[[], Gateway]) -> None:
        self._gateway = gateway

    async def measure(self, ask: Ask, tenant: Tenant) -> Measure:
        """See Warmer. Raises InvalidRequest for a prompt of less than a block, a body that is mostly something else, or
        pins that no backend can hold."""
        gateway = self._gateway()
        model = gateway.models.find(ask.model, tenant, gateway.config)
        (tokens,) = await gateway.prompts.tokens(ask, model, tenant, gateway.config)
        if not tokens.keys:
            hint = f"whole blocks of {BLOCK_TOKENS} tokens are kept; send a longer beginning"
            raise InvalidRequest(f"{tokens.count} tokens are too few to keep", hint=hint, param=ask.subject)
        size = len(msgspec.json.encode(ask.bodies[0]))
        if size > _BYTES_OF_A_TOKEN * tokens.count + _BYTES_BESIDE:
            hint = "leave out what is not part of the prompt"
            raise InvalidRequest(
                f"a body of {size:,} bytes is too much for a prefix of {tokens.count:,} tokens", hint=hint
            )
        if Capability.PINS in ask.needs:
            self._require_pins(model.name, tenant)
        return Measure(model.name, tokens.keys, min(tokens.count, round(len(tokens.keys) * tokens.key_tokens)))

    async def warm(self, ask: Ask, tenant: str, *, avoiding: frozenset[str], placed: Callable[[str], None]) -> Warmed:
        gateway = self._gateway()
        caller = _Nobody(next(gateway.ids), replace(ask, avoiding=avoiding), placed)
        await serve(caller, gateway, known=Identity(on_behalf_of(tenant, gateway.config)))
        if caller.placement is None:
            raise BackendFailed("no backend was asked")
        return Warmed(caller.placement.backend, caller.placement.pool)

    def _require_pins(self, model: str, tenant: Tenant) -> None:
        """Raise InvalidRequest unless a backend of `model` can pin, with the pools that could if it were theirs."""
        gateway = self._gateway()
        able = [
            backend
            for backend in gateway.cluster.view(gateway.clock()).backends
            if Capability.PINS in backend.capabilities
        ]
        if any(model in backend.models for backend in able):
            return
        allowed = gateway.models.of(tenant, gateway.config).keys()
        pools = sorted({backend.pool for backend in able if backend.models & allowed})
        which = f"these pools can: {', '.join(pools)}" if pools else "only pools of kind 'shard' can"
        raise InvalidRequest(
            f"no backend of '{model}' can pin prefixes ({which})",
            hint="leave `pin` out: the prefix is computed there all the same",
            param="pin",
        )


@dataclass(eq=False)
class _Nobody:
    """The caller of a warm-up: asks, and does not read."""

    id: str
    ask: Ask
    placed: Callable[[str], None]
    key: str | None = None
    placement: Placement | None = None

    @property
    def trace(self) -> Mapping[str, str]:
        """It is part of no trace."""
        return {}

    async def read(self, held: Held) -> Ask:  # noqa: ARG002 - its body was read when it was asked for
        """What is to be warmed."""
        return self.ask

    def limited(self, standing: Standing) -> None:
        """Not reported."""

    def explain(self, index: int, explanation: Explanation) -> None:
        """Not explained."""

    def place(self, index: int, placement: Placement) -> None:  # noqa: ARG002 - there is one prompt
        """Remember where it goes."""
        self.placement = placement
        self.placed(placement.backend)

    def write(self, index: int, delta: Delta) -> None:
        """Not passed on."""

    def has_seen(self, index: int) -> bool:  # noqa: ARG002 - there is one prompt
        """Never: another backend may always try."""
        return False


def as_warm_up(ask: Ask, body: Mapping[str, object], *, must_pin: bool) -> Ask:
    """`ask` as what computes its prompt and nothing more; `body` is the same for backends that speak OpenAI's API."""
    return replace(
        ask,
        bodies=(body,),
        sampling=Sampling(temperature=0.0),
        max_new_tokens=1,
        stream=False,
        explain=False,
        echo=False,
        needs=ask.needs | {Capability.PINS} if must_pin else ask.needs,
        yields=True,
    )
