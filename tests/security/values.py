"""Values for fuzzing: what a JSON schema allows, and what nobody should send."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "a", "0", "n0", "default", "normal", "x" * 5_000, "../../etc/passwd", "é\n"]
    ),
)
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 7, 1000, 2**31, 2**53, 2**61, 2**62, 2**63 - 1, -(2**63), 2**64, 10**30]
)
FLOATS = st.sampled_from([0.0, 1.0, -1.5, 3.0, 1e18, 1e308, -1e308, 5e-324])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, FLOATS, TEXTS)
HOSTILE: st.SearchStrategy[Any] = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=4),
    st.dictionaries(TEXTS, SCALARS, max_size=4),
    st.integers(10, 400).map(lambda levels: _nested(levels)),
)
MOST_LEVELS = 6


def _nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def of_schema(schema: dict[str, Any], parts: dict[str, Any], level: int = 0) -> Any:
    """Values that a schema mostly allows; one in some is hostile."""
    good = _good(schema, parts, level)
    return st.integers(0, 19).flatmap(lambda luck: HOSTILE if luck == 0 else good)


def of_type(kind: Any) -> Any:
    """Values as a msgspec type is written, for ``convert`` or an encoder."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="{name}")
    return of_schema(schema, parts)


def _good(schema: dict[str, Any], parts: dict[str, Any], level: int) -> Any:
    if "$ref" in schema:
        part = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: _good(parts[part], parts, level + 1))
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return st.one_of([_good(each, parts, level) for each in schema[choice]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of([_good({**schema, "type": each}, parts, level) for each in kind])
    makers = {"integer": _integers, "number": _floats, "string": _strings}
    if kind in makers:
        return makers[kind](schema)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind == "array":
        return _arrays(schema, parts, level)
    if kind == "object":
        return _objects(schema, parts, level)
    return HOSTILE


def _integers(schema: dict[str, Any]) -> Any:
    low, high = schema.get("minimum", -(2**62)), schema.get("maximum", 2**62)
    small = st.integers(max(low, -2), max(low, min(high, 12)))
    return st.one_of(small, small, st.integers(low, high), st.sampled_from([low, high]))


def _floats(schema: dict[str, Any]) -> Any:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1e12))
    return st.floats(low, schema.get("maximum", 1e12), allow_nan=False)


def _strings(schema: dict[str, Any]) -> Any:
    if schema.get("contentEncoding") == "base64":
        return st.binary(max_size=40)
    if "pattern" in schema:
        return st.sampled_from(["a", "n0", "default", "x1", "10", "a" * 64])
    return TEXTS


def _arrays(schema: dict[str, Any], parts: dict[str, Any], level: int) -> Any:
    if "prefixItems" in schema:
        return st.tuples(
            *(of_schema(each, parts, level + 1) for each in schema["prefixItems"])
        ).map(list)
    items = schema.get("items")
    most = 0 if level > MOST_LEVELS else min(schema.get("maxItems", 4), 4)
    if not isinstance(items, dict):
        return st.lists(SCALARS, max_size=most)
    least = min(schema.get("minItems", 0), most)
    return st.lists(of_schema(items, parts, level + 1), min_size=least, max_size=most)


def _objects(schema: dict[str, Any], parts: dict[str, Any], level: int) -> Any:
    fields = schema.get("properties", {})
    if not fields:
        below = schema.get("additionalProperties")
        values = of_schema(below, parts, level + 1) if isinstance(below, dict) else SCALARS
        return st.dictionaries(
            st.one_of(TEXTS, st.sampled_from(["0", "1", "7"])), values, max_size=3
        )
    required = schema.get("required", [])
    made = {name: of_schema(each, parts, level + 1) for name, each in fields.items()}
    for name in list(made):  # what tells structs apart is never wrong: the rest would not be read
        if "enum" in fields[name] and len(fields[name]["enum"]) == 1:
            made[name] = st.just(fields[name]["enum"][0])
    return st.fixed_dictionaries(
        {name: each for name, each in made.items() if name in required},
        optional={name: each for name, each in made.items() if name not in required},
    )
