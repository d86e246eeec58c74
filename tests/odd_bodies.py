"""Bodies of requests for Hypothesis: as a JSON schema has them, and with something odd in one place of them."""

import copy
import json
from collections.abc import Mapping

from hypothesis import strategies as st

DEEP: list = []
for _ in range(150):
    DEEP = [DEEP]
ODD = st.sampled_from([
    *(None, True, 5, -1, 0, 2**31, 10**30, 10**400, 1.5, 1e39, -1e308, float("nan"), float("inf"), [], {}, DEEP),
    *("", "x", "\ud800", "a\x1b[2J\nb", "\0", "../..", "x" * 3000, "é\u202e", {"a": {"b": [1]}}, [[1]], ["\udc00"]),
]).map(copy.deepcopy)  # a test may change what was drawn


def of_schema(
    schema: Mapping, names: Mapping[str, st.SearchStrategy], defs: Mapping | None = None, text: str | None = None
) -> st.SearchStrategy:
    """Return values that a schema allows; ``names``: the values of a field of that name. text: its letters."""
    defs = schema.get("$defs", {}) if defs is None else defs
    if "$ref" in schema:
        return of_schema(defs[schema["$ref"].rpartition("/")[2]], names, defs, text)
    if "anyOf" in schema:
        return st.one_of([of_schema(part, names, defs, text) for part in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {
                name: names[name] if name in names else of_schema(part, names, defs, text)
                for name, part in schema["properties"].items()
            }
            needed = set(schema.get("required", ()))
            return st.fixed_dictionaries(
                {name: value for name, value in fields.items() if name in needed},
                optional={name: value for name, value in fields.items() if name not in needed},
            )
        case "object":
            return st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2)
        case "array":
            items = of_schema(schema["items"], names, defs, text)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=min(3, schema.get("maxItems", 3)))
        case "integer":
            low = schema.get("minimum", 0)
            return st.integers(low, min(schema.get("maximum", 9), low + 12))
        case "number":
            low = schema.get("minimum", 0.0)
            return st.floats(low, min(schema.get("maximum", 1.0), low + 1.0))
        case "string":
            return st.text(*[text] if text else [], min_size=schema.get("minLength", 0), max_size=8)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return ODD


@st.composite
def bodies(draw, valid: st.SearchStrategy) -> bytes:
    """Draw a body, of which mostly one place is replaced or gone; now and then it is no JSON at all."""
    value = draw(valid)
    kind = draw(st.sampled_from(["as it is", "odd", "odd", "odd", "gone", "more", "cut"]))
    if kind in ("odd", "gone"):
        value = _changed(draw, value, kind)
    text = json.dumps({**value, "surplus": draw(ODD)} if kind == "more" and isinstance(value, dict) else value)
    return text[: len(text) // 2].encode() if kind == "cut" else text.encode()


def _changed(draw, value: object, kind: str) -> object:
    """Return a value with one place in it, at any depth, odd or gone."""
    places = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not places or draw(st.integers(0, 9)) == 0:
        return draw(ODD)
    place = draw(st.sampled_from(places))
    inner = value[place]
    if isinstance(inner, dict | list) and inner and draw(st.booleans()):
        inner = _changed(draw, inner, kind)
    elif kind == "gone":
        rest = dict(value) if isinstance(value, dict) else list(value)
        del rest[place]
        return rest
    else:
        inner = draw(ODD)
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[place] = inner
    return changed
