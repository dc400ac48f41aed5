"""The models that clients see, by what the backends report."""

from __future__ import annotations

import random
from dataclasses import dataclass

from backends.base import Description
from backends.fake import FakeBackend
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import Models, ServedModel

SMALL = Description(frozenset({"llama"}), context_tokens=4096, vocabulary=100)
LARGE = Description(frozenset({"llama", "sql"}), context_tokens=131072, vocabulary=90, speaks_tokens=True)


@dataclass
class Described(FakeBackend):
    """A fake that describes itself as a test says."""

    says: Description | None = None

    def describe(self) -> Description | None:
        return self.says


def a_backend(name: str, says: Description | None, pool: str = "own", **files: bytes) -> Described:
    return Described(name, pool, says=says, files={name.replace("_", "."): text for name, text in files.items()})


def found(models: Models, name: str) -> ServedModel:
    model = models.find(name)
    assert model is not None
    return model


def test_a_model_is_what_its_backends_report_together() -> None:
    models = Models()
    models.note(a_backend("a", SMALL))
    models.note(a_backend("b", LARGE, "far", tokenizer_json=b"{}"))
    assert models.names() == {"llama", "sql"}
    llama = found(models, "llama")
    assert (llama.backends, llama.pools, llama.speaks_tokens) == (2, {"own", "far"}, True)
    assert (llama.context_tokens, llama.shortest_context_tokens, llama.vocabulary) == (131072, 4096, 90)
    assert llama.assets == {"tokenizer.json": b"{}"}
    assert (found(models, "sql").backends, models.find("qwen")) == (1, None)


def test_a_backend_that_reports_no_context_does_not_count_as_the_shortest() -> None:
    models = Models()
    models.note(a_backend("a", Description(frozenset({"llama"}))))
    assert found(models, "llama").shortest_context_tokens is None
    models.note(a_backend("b", SMALL))
    assert found(models, "llama").shortest_context_tokens == 4096


def test_a_model_is_computed_again_only_when_a_report_has_changed() -> None:
    models, backend = Models(), a_backend("a", SMALL)
    models.note(backend)
    first = found(models, "llama")
    models.note(backend)
    assert found(models, "llama") is first
    backend.says = LARGE
    models.note(backend)
    assert found(models, "llama").context_tokens == 131072
    backend.says = None
    models.note(backend)
    assert models.find("llama") is None
    backend.says = SMALL
    models.note(backend)
    models.forget("a")
    models.forget("a")
    assert models.find("llama") is None
    assert models.names() == set()


def test_a_cluster_knows_what_changed_backends_serve() -> None:
    backends = [a_backend(f"b{number}", None) for number in range(3)]
    cluster = Cluster(backends, clock=lambda: 0.0, rng=random.Random(1))
    assert cluster.models() == {}
    for backend in backends[:2]:
        backend.says = LARGE
        cluster.changed(backend.name)
    model = cluster.model("sql")
    assert model is not None
    assert model.backends == 2
    assert list(cluster.models()) == ["llama", "sql"]
    backends[0].says = SMALL
    cluster.changed("b0")
    model = cluster.model("sql")
    assert model is not None
    assert model.backends == 1
