"""What a router prints for people at its start: its addresses at once, then what it serves or waits for."""

from __future__ import annotations

from collections.abc import Iterator

from policies.sla.config import Config
from policies.sla.pools import BUNDLED, PoolSpec
from policies.sla.server import STATE_OFF
from router.operate.telemetry.logs import Notices
from router.start.address import Address
from router.start.app import Router
from router.start.commands.overrides import USUAL_ADMIN

PATIENCE_S = 2.0
"""Backends that run already are reached in this time; it is the time after which those that are not are named."""

_MOST_NAMED = 3

_BUNDLED = """\
  the bundled model is for trying out: it copies facts about mills, gates and stations that the prompt states, and \
knows nothing else; `pointsman up --model DIRECTORY` serves one of yours"""


async def greet(notices: Notices, config: Config, router: Router, patience_s: float = PATIENCE_S) -> None:
    """Show the addresses; then the models, as soon as every pool has a healthy backend.

    After `patience_s` shows what the router waits for, with the models that it serves meanwhile.
    """
    listeners = {"http": router.http_url, "grpc": router.grpc_address, "metrics": router.metrics_url}
    notices.show(*addresses(config, router), **listeners)
    if not await router.wait_until_reached(patience_s):
        for pool, line in missing(config, router):
            notices.show(line, pool=pool)
        if _served(router):
            _show_example(notices, config, router)
        await router.wait_until_reached(None)
    _show_example(notices, config, router)


def _show_example(notices: Notices, config: Config, router: Router) -> None:
    notices.show(*example(config, router), models=_served(router))


def addresses(config: Config, router: Router) -> Iterator[str]:
    """Where the router listens, and how it is ended."""
    yield "Pointsman listens; Ctrl-C ends it"
    metrics = "" if router.metrics_url is None else f"   (metrics: {router.metrics_url})"
    yield f"  HTTP  {router.http_url}/v1{metrics}"
    if router.grpc_address:
        yield f"  gRPC  {router.grpc_address}   (pointsman.v1.Inference, with reflection)"
    if router.admin is not None:
        url = f"{router.scheme('admin')}://{router.admin}"
        yield f"  dashboard  {url}/dashboard   (in a terminal: pointsman top{_where(router.admin)})"
    if config.server.state not in {None, STATE_OFF}:
        yield f"  state  {config.server.state}"


def example(config: Config, router: Router) -> Iterator[str]:
    """The models, and a command that asks one of them."""
    models = _served(router)
    yield f"Pointsman serves {', '.join(models) or 'no model yet'}"
    if any(pool.local and pool.model == BUNDLED for pool in config.pools.values()):
        yield _BUNDLED
    key = "" if config.anonymous else " -H 'authorization: Bearer YOUR_KEY'"
    body = f'{{"model": "{models[0] if models else "MODEL"}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    yield f"\ncurl {router.http_url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'\n"


def _served(router: Router) -> list[str]:
    """The models that some backend serves now; those that the file names are known before."""
    cluster = router.gateway.cluster
    return sorted(model for model in router.models() if any(cluster.may_serve(name, model) for name in cluster.names()))


def missing(config: Config, router: Router) -> Iterator[tuple[str, str]]:
    """Each pool that has no healthy backend, and what it waits for, with the reason as far as it is known."""
    ready = router.gateway.cluster.pools_ready()
    for pool in config.pools.values():
        if ready.get(pool.name) or pool.wake is not None:
            # a pool that sleeps is woken by a request
            continue
        ill = list(_troubles(router, pool.name))
        more = f"; and {len(ill) - _MOST_NAMED} more" if len(ill) > _MOST_NAMED else ""
        where = f" at {', '.join(pool.at[:_MOST_NAMED])}" if pool.at else ""
        reasons = "; ".join(ill[:_MOST_NAMED]) or _unfound(pool)
        yield pool.name, f"Waiting for pool '{pool.name}'{where}: {reasons}{more}"


def _troubles(router: Router, pool: str) -> Iterator[str]:
    cluster = router.gateway.cluster
    for name in cluster.names():
        trouble = cluster.trouble(name) if cluster.backend(name).pool == pool else None
        if trouble is not None:
            yield trouble.reason if trouble.reason.startswith(name) else f"{name}: {trouble.reason}"


def _unfound(pool: PoolSpec) -> str:
    where = [*map(str, pool.sources), *(["backends that register"] if pool.register else [])]
    return f"none was found yet ({', '.join(where)})" if where else "no backend answers yet"


def _where(admin: Address) -> str:
    return "" if str(admin) == USUAL_ADMIN else f" --admin {admin}"
