"""The client endpoints that a server has itself, and the fields that they take, from its OpenAPI document. Pure.

Source: OpenAPI Specification 3.1, "Paths Object", "Request Body Object".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.http.nonsense import MISSHAPEN
from backends.nesting import decode_page

PATH = "/openapi.json"
"""Where servers that are made with FastAPI have it: vLLM, SGLang, LMDeploy, TensorRT-LLM."""

Endpoints = Mapping[str, frozenset[str]]
"""Path -> names of the members of a body that is posted there."""


def endpoints_in(page: bytes) -> Endpoints:
    """All endpoints for POST in an OpenAPI document; none where it cannot be read."""
    try:
        document = decode_page(page)
        posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
        return {path: _fields(post, document) for path, post in posts.items()}
    except MISSHAPEN:
        return {}


def _fields(post: Mapping[str, Any], document: Mapping[str, Any]) -> frozenset[str]:
    content = (post.get("requestBody") or {}).get("content") or {}
    schema = (content.get("application/json") or {}).get("schema") or {}
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return frozenset(schema.get("properties") or {})
