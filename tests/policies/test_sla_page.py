from collections.abc import Iterable
from pathlib import Path

import pytest

from policies.catalogue import builtin_catalogue
from policies.config import KINDS
from policies.parse import TOP_KEYS
from policies.sla.classes import CLASS_KEYS
from policies.sla.policies import POLICY_KEYS
from policies.sla.pools import POOL_KEYS, SERVER_KEYS
from policies.sla.rules import RULE_KEYS, WHEN_KEYS
from policies.sla.tenants import CACHE_KEYS, LIMIT_KEYS, TENANT_KEYS

PAGE = (Path(__file__).parents[2] / "docs/sla.md").read_text()
CATALOGUE = builtin_catalogue()
WORDS: dict[str, Iterable[str]] = {
    "sections": TOP_KEYS,
    "classes": CLASS_KEYS,
    "tenants": (*TENANT_KEYS, *LIMIT_KEYS, *CACHE_KEYS),
    "pools": (*POOL_KEYS, *KINDS),
    "rules": (*RULE_KEYS, *WHEN_KEYS),
    "policies": (*POLICY_KEYS, *CATALOGUE.policies),
    "filters": CATALOGUE.filters,
    "scores": CATALOGUE.scores,
    "picks": CATALOGUE.picks,
    "options": [
        *(option for part in CATALOGUE.filters.values() for option in part.options),
        *(option for part in CATALOGUE.scores.values() for option in part.options),
        *(option for part in CATALOGUE.picks.values() for option in part.options),
    ],
    "server": SERVER_KEYS,
}


@pytest.mark.parametrize("section", WORDS)
def test_every_word_of_the_file_is_in_the_reference(section: str) -> None:
    assert [word for word in WORDS[section] if f"`{word}`" not in PAGE] == []
