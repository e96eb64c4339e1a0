"""The OpenAPI 3 document, made from the table of endpoints and the structs that they name."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from phalanx import __version__
from phalanx.control.server.http.endpoints import Endpoint
from phalanx.control.wire.api_types import MOST, Failure

REF = "#/components/schemas/{name}"
REFUSALS = {
    "400": "The request does not make sense.",
    "401": "No token, a wrong one, or an expired one.",
    "403": "The token does not allow this.",
    "404": "There is no such thing (for this caller).",
    "409": "It does not fit the present state; the message says why.",
    "411": "The request does not say how long its body is.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "422": "It would take more work than the server gives to one request.",
    "429": "Too many requests; see Retry-After.",
    "503": "This server does not lead, or cannot store anything now.",
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document."""
    types = [Failure]
    for endpoint in endpoints:
        types += [each for each in (endpoint.answer, endpoint.body) if each is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    by_type = {id(each): schema for each, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Phalanx",
            "version": __version__,
            "summary": "The control plane of Phalanx.",
            "description": (
                "Every call but those marked otherwise needs `Authorization: Bearer TOKEN`. "
                "A call that changes something may carry `Idempotency-Key`: repeated with the same "
                "key it is done once and answered the same; another request with that key is "
                "refused (`key_reused`). Agents and live views use WebSockets (`/v1/agent`, "
                "`/v1/live`), which OpenAPI does not describe."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": {
                # What is counted has no bound: a fleet's GPU-nanoseconds are large.
                name: schema if name == "Share" else _bounded(schema)
                for name, schema in components.items()
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _operation(endpoint: Endpoint, schemas: dict[int, Any]) -> dict[str, Any]:
    failure = {"application/json": {"schema": {"$ref": REF.format(name="Failure")}}}
    responses: dict[str, Any] = {
        status: {"description": text, "content": failure} for status, text in REFUSALS.items()
    }
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        content = {"application/json": {"schema": schemas[id(endpoint.answer)]}}
    responses[str(endpoint.status)] = {"description": "Done.", "content": content}
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "tags": [endpoint.path.split("/")[2] if endpoint.path.count("/") > 1 else "server"],
        "responses": dict(sorted(responses.items())),
        "x-roles": list(endpoint.roles),
        "parameters": [
            *_parameters(endpoint.params, "path"),
            *_parameters(endpoint.query, "query"),
        ],
    }
    if not endpoint.roles:
        operation["security"] = []
    if endpoint.method != "GET" and endpoint.roles:
        operation["parameters"].append(IDEMPOTENCY)
    if endpoint.body is not None:
        body = {"application/json": {"schema": schemas[id(endpoint.body)]}}
        operation["requestBody"] = {"required": not endpoint.optional_body, "content": body}
    return operation


IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
}


def _parameters(struct: Any, location: str) -> list[dict[str, Any]]:
    if struct is None:
        return []
    hints = typing.get_type_hints(struct, include_extras=True)
    return [
        {
            "name": field.encode_name,
            "in": location,
            "required": field.default is msgspec.NODEFAULT,
            "schema": {
                **_bounded(msgspec.json.schema(hints[field.name])),
                **({} if field.default is msgspec.NODEFAULT else {"default": field.default}),
            },
        }
        for field in msgspec.structs.fields(struct)
    ]


def _bounded(schema: Any) -> Any:
    """Integers fit into what is stored: the document says so as well."""
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {key: _bounded(value) for key, value in schema.items()}
    if bounded.get("type") == "integer":
        bounded.setdefault("minimum", -(MOST << 8))
        bounded.setdefault("maximum", MOST << 8)
    return bounded
