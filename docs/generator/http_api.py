"""The HTTP API as pages, from the OpenAPI document that the server gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs.generator.markdown import anchor, code, one_line, paragraphs, prose, table
from phalanx.control.server.app import ENDPOINTS
from phalanx.control.server.http.openapi import REFUSALS, document

TYPES = "http-types.md"


def openapi() -> dict[str, Any]:
    """The document of all endpoints."""
    return document(ENDPOINTS)


def operations() -> list[str]:
    """Every operation by resource, and what refusals mean."""
    whole = openapi()
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    lines = [*paragraphs(whole["info"]["description"]), "## Refusals", ""]
    lines += [*table(("status", "meaning"), REFUSALS.items()), ""]
    for tag in sorted(by_tag):
        lines += [f"## {tag}", ""]
        for method, path, operation in by_tag[tag]:
            lines += _operation(method, path, operation)
    return lines


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    roles = ", ".join(operation["x-roles"]) or "anybody"
    yield f"### `{method} {path}`"
    yield ""
    yield f"{prose(operation['summary'])} Roles: {roles}."
    yield ""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    (done,) = (each for status, each in operation["responses"].items() if status[0] == "2")
    ((media, answer),) = done["content"].items()
    gives = "text" if media == "text/plain" else kind(answer["schema"])
    yield f"Takes {kind(body['schema'])}; gives {gives}." if body else f"Gives {gives}."
    yield ""
    rows = [
        (
            code(each["name"]),
            each["in"],
            kind(each["schema"]),
            "required" if each["required"] else _default(each["schema"]),
        )
        for each in operation["parameters"]
        if each["in"] != "header"
    ]
    if rows:
        yield from table(("parameter", "in", "type", "default"), rows)
        yield ""


def types() -> list[str]:
    """Every type that requests and answers are made of."""
    lines: list[str] = []
    for name, schema in sorted(openapi()["components"]["schemas"].items()):
        lines += [f"## {name}", "", *paragraphs(schema.get("description", ""))]
        required = set(schema.get("required", ()))
        rows = [
            (code(field), kind(each), "required" if field in required else _default(each))
            for field, each in schema.get("properties", {}).items()
        ]
        if rows:
            lines += [*table(("field", "type", "default"), rows), ""]
        elif "properties" not in schema:
            lines += [kind(schema), ""]
    return lines


def kind(schema: dict[str, Any]) -> str:
    """A schema in words, with links to the types that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}]({TYPES}#{anchor(name)})"
    if "anyOf" in schema:
        return " or ".join(kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(code(str(each)) for each in schema["enum"])
    if "const" in schema:
        return code(str(schema["const"]))
    if schema.get("type") == "array":
        entries = schema.get("items") or {}
        if "prefixItems" in schema:
            return "array of (" + ", ".join(kind(each) for each in schema["prefixItems"]) + ")"
        return f"array of {kind(entries)}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"object of {kind(values)}" if isinstance(values, dict) and values else "object"
    return str(schema.get("type", "anything"))


def _default(schema: dict[str, Any]) -> str:
    if "default" not in schema:
        return ""
    return code(one_line(json.dumps(schema["default"], ensure_ascii=False)))
