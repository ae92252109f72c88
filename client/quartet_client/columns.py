"""The columns of a data set as the fields of prompts: the map of a source, and a proposal of one."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from quartet_client.errors import InputError
from quartet_client.prompts import Prompt
from quartet_common.references import joined_cases, program_text, read_text
from quartet_common.run_file import toml_value

JOINED = {"messages": "\n\n", "prompt": "\n\n", "test_program": "\n", "test_cases": ""}
"""Fields that may be read from several columns, and what is put between their texts."""

Columns = str | Sequence[str]
Row = dict[str, Any]


def mapped(row: Row, fields: Mapping[str, Columns], where: str, key: str) -> Row:
    """Return a row with the columns of a map under its fields' names, the others under `columns`.

    Args:
        where: the row's place, for errors.
        key: the run-file key of its source, for errors.

    Raises:
        InputError: a column is missing, or several cannot be joined.
    """
    found, used = {}, set()
    for field, columns in fields.items():
        names = [columns] if isinstance(columns, str) else columns
        values = []
        for name in names:
            try:
                values.append(_value(row, name))
            except LookupError as error:
                raise InputError(f"{key}.fields.{field}: {where} {error.args[0]}") from None
            used.add(name if name in row else name.partition(".")[0])
        value = values[0]
        if not isinstance(columns, str):
            try:
                value = _joined(field, [each for each in values if each], row.get("entry_point", ""))
            except ValueError as error:
                raise InputError(f"{key}.fields.{field}: {where}: {error}") from None
        if value is not None:
            found[field] = value
    others = {column: value for column, value in row.items() if column not in used}
    own = found.get("columns", {})
    return {**found, "columns": others | own} if others and isinstance(own, dict) else found


def _value(row: Row, name: str) -> Any:
    """Return a column, or what "reward_model.ground_truth" names within one, also if that is JSON text.

    Raises LookupError with what is there instead.
    """
    if name in row:
        return row[name]
    value: Any = row
    at = ""
    for part in name.split("."):
        if isinstance(value, str):
            try:
                value = read_text(value)
            except ValueError as error:
                raise LookupError(f"has no column '{name}': '{at}' is text, and {error}") from None
        if value is None:
            return None
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            raise LookupError(f"has no column '{name}'; {_there(value, at, part)}")
        at = f"{at}.{part}" if at else part
    return value


def _there(value: Any, at: str, part: str) -> str:
    if not isinstance(value, dict):
        return f"'{at}' is {f'a list of {len(value)}' if isinstance(value, list) else repr(value)[:60]}"
    before = f"{at}." if at else ""
    if close := difflib.get_close_matches(part, map(str, value), n=1):
        return f"did you mean '{before}{close[0]}'?"
    return f"there are {', '.join(f'{before}{each}' for each in value) or 'none'}"


def _joined(field: str, values: list[Any], entry_point: str) -> Any:
    """Return the values of several columns as one. Raises ValueError."""
    if field == "test_cases":
        return joined_cases(values, entry_point) if values else None
    texts = [program_text(value) for value in values]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"got {repr(text)[:60]} in one of several columns; text can be joined")
    return JOINED[field].join(texts) or None


_SETTINGS = ("sampling", "verifiers", "environment")
_INPUT_FIELDS = frozenset({"messages", "prompt", "token_ids"})
_REFERENCE_FIELDS = frozenset({"gt_answer", "test_cases", "test_program"})
_INPUTS: tuple[tuple[str, Columns], ...] = (
    *(("messages", name) for name in ("messages", "prompt", "question", "problem", "question_content")),
    *(("messages", name) for name in ("description", "instruction", "query", "text", "input")),
    ("messages", "responses_create_params.input"),
)
_REFERENCES: tuple[tuple[str, Columns], ...] = (
    ("test_cases", ["public_tests", "private_tests", "generated_tests"]),
    *(("test_cases", name) for name in ("input_output", "official_tests", "tests", "verification_info.test_cases")),
    *(("test_cases", name) for name in ("test_cases", "reward_model.ground_truth")),
    ("test_program", ["test_setup_code", "test_list"]),
    ("test_program", ["test_imports", "test_list"]),
    *(("test_program", name) for name in ("test_list", "test_code", "test")),
    *(("gt_answer", name) for name in ("reward_model.ground_truth", "verification_info.ground_truth")),
    *(("gt_answer", name) for name in ("final_answer", "ground_truth", "expected_answer", "answer", "solution")),
    *(("gt_answer", name) for name in ("target", "label", "output", "response", "completion")),
)


def proposal(row: Row, fields: Mapping[str, Columns], require_reference: bool, chats: bool = True) -> str:
    """Return the end of an error about a refused row: what makes it a prompt, a map of its columns or a function in
    docs/data.md; if that is unknown, and the error may be about its columns, what it has.

    Args:
        fields: the map that its source has; empty: none.
        require_reference: the prompt must have a reference.
        chats: the model may have a chat template; else `prompt` is proposed instead of `messages`.
    """
    if section := _function_for(row):
        return f"; rows like this are converted by the function for {section} in docs/data.md"
    if any(row.get(name) and not fields and not _is_field(name, row[name]) for name in _SETTINGS):
        return ""
    own = _own(row, fields)
    fit = fitting(row, fields, require_reference, chats)
    if fit and fit != own:
        return f"; its columns fit with fields = {toml_value(fit)}"
    named = fields or {name for name, value in row.items() if value not in (None, "")}
    if _INPUT_FIELDS.intersection(named) and (
        not require_reference or _REFERENCE_FIELDS.intersection(named) or not _fits(row, own)
    ):
        return ""  # the error is about a value
    given = ", ".join(str(name) for name, value in row.items() if value is not None) or "no column"
    return f"; the row has {given}: name them in `fields`, or convert it by a function"


def fitting(
    row: Row, fields: Mapping[str, Columns], require_reference: bool, chats: bool = True
) -> dict[str, Columns] | None:
    """Return a map of the columns with which a row is a prompt; None if there is none. Arguments as for `proposal`."""
    own = _own(row, fields)
    inputs = [{}, *({field if chats else "prompt": name} for field, name in _INPUTS)]
    references = [{}, *({field: name} for field, name in _REFERENCES)]
    for new in ({**one, **other} for one in inputs for other in references):
        replaced = _INPUT_FIELDS if new.keys() & _INPUT_FIELDS else frozenset()
        full = {field: name for field, name in own.items() if field not in replaced} | new
        if _fits(row, full, require_reference):
            return full
    return None


def _own(row: Row, fields: Mapping[str, Columns]) -> dict[str, Columns]:
    return dict(fields) or {name: name for name in Prompt.model_fields if name in row and _is_field(name, row[name])}


def _function_for(row: Row) -> str:
    if row.get("private_test_cases"):
        return "LiveCodeBench"
    if row.get("generated_checker"):
        return "open-r1/codeforces"
    return "KodCode" if "from solution import" in str(row.get("test_code") or row.get("test") or "") else ""


def _is_field(name: str, value: Any) -> bool:
    """Return whether a column's value is one of the field with its name."""
    return _fits({"prompt": "a", name: value}, {name: name, **({} if name in _INPUT_FIELDS else {"prompt": "prompt"})})


def _fits(row: Row, fields: Mapping[str, Columns], require_reference: bool = False) -> bool:
    try:
        prompt = Prompt.parse(mapped(row, fields, "", ""))
    except InputError:
        return False
    if prompt.messages and not any(message.content for message in prompt.messages):
        return False
    return prompt.has_reference or not require_reference
