"""docs/run-file.md and docs/run-file.schema.json: every section and key of the run file, from the models."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from escaping import escaped

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(__file__).with_name("run_file_models.py")
READERS = ("dev", "broker", "reward", "rollout", "environment", "trainer")
ORDER = (
    "run",
    "model",
    "data",
    "addresses",
    "security",
    "server",
    "tracing",
    "broker",
    "reward",
    "rollout",
    "environment",
    "trainer",
    "sft",
    "launcher",
)
READ_BY = {
    **dict.fromkeys(("run", "model", "addresses", "security", "server", "tracing"), "all services and the client"),
    "data": "the client",
    "sft": "the trainer with `--sft`, and `quartet sft`",
    "reward": "the reward service",
    "rollout": "the rollout service",
    "environment": "the environment service",
}

_ANY = 2**31 - 1  # what any integer may be
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

HEAD = """\
# The run file, key by key

A run is one TOML file. Every service reads its own section and the shared ones. It refuses an unknown key and suggests
the closest known one. Without a file all keys have their defaults.

- On the command line `--set SECTION.KEY=VALUE` wins over the file; the value is TOML, and a bare word is a string.
- Relative paths are relative to the folder in which the process is started.
- `quartet run FILE --dry-run` and `quartet-SERVICE FILE --dry-run` check the file, and print what they read.
- Editors that support JSON Schema complete and check it: [run-file.schema.json](run-file.schema.json). With Taplo (VS
  Code's "Even Better TOML", Helix, Neovim) a first line `#:schema PATH/docs/run-file.schema.json` is enough.

[start.md](start.md) has a complete file for a first run. `docs/tools/write.py` makes this page from the models.
"""


@cache
def read_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of all sections, from each reader's environment."""
    processes = {
        reader: subprocess.Popen(
            [ROOT / ".quartet" / "envs" / reader / "bin" / "python", MODELS, reader],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        for reader in READERS
    }
    found: dict[str, dict[str, Any]] = {}
    for reader, process in processes.items():
        answer, _ = process.communicate(timeout=120)
        if process.returncode:
            raise SystemExit(f"the models of {reader} cannot be read: see above")
        found |= json.loads(answer)
    return {name: found[name] for name in ORDER}


def page(schemas: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for name, schema in schemas.items():
        found = list(tables(name, schema))
        for number, (keys, kind, model) in enumerate(found):
            # The class's own name of its section is in the heading already.
            about, *examples = model.get("description", "").split(">>> ")
            about = re.sub(r"^\[[\w.]+\]: ", "", escaped(" ".join(about.split())))
            heading = ", ".join(f"`[[{key}]]`" if kind == "list" else f"`[{key}]`" for key in keys)
            heading += "" if kind in ("table", "list") else f", `{kind}`"
            parts.append(f"{'##' if number == 0 else '###'} {heading}\n")
            if number == 0:
                reader = READ_BY.get(name, f"the {name}")
                about = f"{about.rstrip('.')}. Read by {reader}."
            parts.append(f"{about[:1].upper()}{about[1:]}\n")
            if examples:
                shown = "".join("  →  ".join(each.split("\n", 1)).rstrip() + "\n" for each in examples)
                parts.append(f"```text\n{shown}```\n")
            if model["properties"]:
                parts.append(table(model, schema.get("$defs", {})))
    return "\n".join(parts)


def keys(schemas: dict[str, dict[str, Any]]) -> tuple[set[str], set[str]]:
    """Return all dotted keys, including sections, and those below which any key is allowed."""
    known, free = set(), set()
    for name, schema in schemas.items():
        known.add(name)
        for prefixes, _, model in tables(name, schema):
            for prefix in prefixes:
                known |= {f"{prefix}.{key}" for key in model["properties"]} | {prefix}
                free |= {
                    f"{prefix}.{key}"
                    for key, field in model["properties"].items()
                    if any("additionalProperties" in form for form in _forms(field))
                }
    return known, free


def defaults(schemas: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the defaults, in TOML, of all keys that have one, without sections; the first, where one is chosen."""
    return {
        f"{prefix}.{key}": _toml(field["default"])
        for name, schema in schemas.items()
        for prefixes, kind, model in reversed([*tables(name, schema)])
        for prefix in prefixes
        for key, field in model["properties"].items()
        if field.get("default") not in (None, "", [], {}) and not _nested(field, schema.get("$defs", {}))
    }


def json_schema(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a JSON schema of the whole file."""
    definitions: dict[str, Any] = {}
    sections = {}
    for name, schema in schemas.items():
        whole = copy.deepcopy(schema)
        for key, definition in whole.pop("$defs", {}).items():
            definitions[f"{name}.{key}"] = _renamed(definition, name)
        sections[name] = _renamed(whole, name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run file of Quartet",
        "type": "object",
        "additionalProperties": False,
        "properties": sections,
        "$defs": definitions,
    }


def _renamed(node: Any, section: str) -> Any:
    """Return a schema with references to `$defs` changed to their places in the whole schema."""
    if isinstance(node, dict):
        return {
            key: value.replace("#/$defs/", f"#/$defs/{section}.") if key == "$ref" else _renamed(value, section)
            for key, value in node.items()
        }
    return [_renamed(value, section) for value in node] if isinstance(node, list) else node


def _forms(field: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a field's type, without null."""
    return [form for form in field.get("anyOf", [field]) if form.get("type") != "null"]


def _nested(field: dict[str, Any], definitions: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the model of a subsection ("table") or of a list's entries ("list"); several, if its `name` chooses."""
    found = []
    for form in _forms(field):
        for kind, one in (("table", form), ("list", form.get("items", {}))):
            name = one.get("$ref", "").rpartition("/")[2]
            if name and "properties" in definitions[name]:
                found.append((kind, name))
    return tuple(found)


def tables(name: str, schema: dict[str, Any]) -> Iterator[tuple[list[str], str, dict[str, Any]]]:
    """Yield (places, "table" or "list", model) for a section and its subsections; each model once.

    Where a `name` chooses among models: what all of them have, then (places, "name = …", what one has besides, or has
    otherwise) for each.
    """
    definitions = schema.get("$defs", {})
    yield [name], "table", schema
    places: dict[tuple[tuple[str, str], ...], list[str]] = {}

    def collect(prefix: str, model: dict[str, Any]) -> None:
        for key, field in model["properties"].items():
            if nested := _nested(field, definitions):
                places.setdefault(nested, []).append(f"{prefix}.{key}")
                for _, model_name in nested:
                    collect(f"{prefix}.{key}", definitions[model_name])

    collect(name, schema)
    for ((kind, model), *others), where in places.items():
        if not others:
            yield where, kind, definitions[model]
            continue
        models = [definitions[each] for _, each in ((kind, model), *others)]
        fields = models[0]["properties"]
        shared = {key: field for key, field in fields.items() if all(key in each["properties"] for each in models)}
        names = [each["properties"]["name"]["const"] for each in models]
        shared_by_all = "A name alone stands for its defaults. Keys that all have; below are each one's other keys."
        chosen = {**shared["name"], "enum": names, "description": "Which of the following."}
        chosen.pop("const")
        yield where, kind, {"description": shared_by_all, "properties": {**shared, "name": chosen}}
        for choice, each in zip(names, models, strict=True):
            own = {key: field for key, field in each["properties"].items() if key != "name"}
            own = {key: field for key, field in own.items() if field != shared.get(key)}
            yield where, f'name = "{choice}"', {**each, "properties": own}


def table(model: dict[str, Any], definitions: dict[str, Any], of: str = "key") -> str:
    """Return the table of a model's fields."""
    rows = [f"| {of} | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    required = model.get("required", ())
    for key, field in model["properties"].items():
        nested = _nested(field, definitions)
        default = "" if nested and nested[0][0] == "table" else _default(field, key in required)
        means = escaped(meaning(field, definitions))
        cells = (f"`{key}`", _type(field, definitions), default, _allowed(key, field), means)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def meaning(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return a key's description. (Pydantic omits one that equals its model's docstring.)"""
    nested = _nested(field, definitions)
    return field.get("description") or (definitions[nested[0][1]].get("description", "") if nested else "")


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_type_of(form, definitions) for form in _forms(field)))


def _type_of(form: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in form:
        model = definitions[form["$ref"].rpartition("/")[2]]
        return "section" if "properties" in model else _type_of(model, definitions)
    kind = form.get("type", "any value")
    if kind == "array":
        if "prefixItems" in form:
            return "[" + ", ".join(_type_of(one, definitions) for one in form["prefixItems"]) + "]"
        inner = _type(form.get("items", {}), definitions)
        return "list of sections" if inner == "section" else f"list of {inner}"
    if kind == "object":
        inner = form.get("additionalProperties")
        return f"table of {_type(inner, definitions)}" if isinstance(inner, dict) and inner else "table"
    return {"boolean": "true or false", "string": form.get("format", "string")}.get(kind, kind)


def _default(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    value = field.get("default")
    if value is None:
        return ""
    text = f"`{_toml(value)}`"
    return f"{text} ({_size(value)})" if _size(value) else text


def _toml(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {_toml(one)}" for key, one in value.items() if one is not None)
        return "{ " + inner + " }" if inner else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _size(value: Any) -> str:
    value = int(value) if isinstance(value, float) and value == int(value) else value
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if isinstance(value, int) and value >= 1 << bits and value % (1 << bits) == 0:
            return f"{value >> bits} {unit}"
    return ""


def _number(key: str, value: float) -> str:
    size = _size(value) if key.endswith("_bytes") else ""
    return size or (str(int(value)) if value == int(value) else str(value))


def _allowed(key: str, field: dict[str, Any]) -> str:
    found = []
    for form in _forms(field):
        found += [f"`{json.dumps(value)}`" for value in form.get("enum", ())]
        if "const" in form:
            found.append(f"`{json.dumps(form['const'])}`")
        if words := re.fullmatch(r"\^\(([\w|]+)\)\$", form.get("pattern", "")):
            found += [f'`"{word}"`' for word in words[1].split("|")]
        elif "pattern" in form:
            found.append(f"`{form['pattern']}`")
        limits = [(sign, form[name]) for name, sign in _BOUNDS.items() if abs(form.get(name, _ANY)) < _ANY]
        bounds = [f"{sign} {_number(key, limit)}" for sign, limit in limits]
        found += [" and ".join(bounds)] if bounds else []
    return ", ".join(found)
