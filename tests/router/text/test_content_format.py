"""Whether templates get parts or texts: the same answers that vLLM 0.32 gives for each of these."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from router.text.content_format import wants_parts

OVER = "{% for m in messages %}{% for p in m.content %}x{% endfor %}{% endfor %}"
MACRO = "{% macro r(c) %}{% for p in c %}x{% endfor %}{% endmacro %}{% for m in messages %}"


@pytest.mark.parametrize(
    "template",
    [
        OVER,
        "{% for m in messages %}{% for p in m['content'] %}x{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for p in m.content[1:] %}x{% endfor %}{% endfor %}",
        "{% set l = messages[1:] %}{% set k = l | list %}" + OVER.replace("messages", "k"),
        "{% for m in messages | selectattr('role') %}{% for p in m.content | list %}x{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}{% for p in content %}x{% endfor %}{% endfor %}",
        MACRO + "{{ r(m.content) }}{% endfor %}",
        MACRO + "{{ r(c=m['content']) }}{% endfor %}",
        MACRO.replace("(c)", "(content)").replace("in c ", "in content ") + "{{ r(m.content) }}{% endfor %}",
    ],
)
def test_a_template_that_loops_over_content_wants_parts(template: str) -> None:
    assert wants_parts(Environment().parse(template))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}{% for p in c %}x{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for p in m.get('content') %}x{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for p in (m.content if m else m) %}x{% endfor %}{% endfor %}",
        "{% for p in messages[0].content %}x{% endfor %}",
        "{{ messages[0].content[0].text }}",
        MACRO + "{{ r(m.role) }}{{ m.content }}{% endfor %}",
        MACRO.replace("(c)", "(content)").replace("in c ", "in content ") + "{{ m.content }}{% endfor %}",
        "{% for role, m in messages %}{% for p in m.content %}x{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for k, v in m.content %}x{% endfor %}{% endfor %}",
        "{% set ns.rest = messages[1:] %}" + OVER,
    ],
)
def test_any_other_template_gets_texts(template: str) -> None:
    assert not wants_parts(Environment().parse(template))
