"""Finds the error messages in the source, as templates with "…" for variable parts."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from pages import ROOT

PACKAGES = {
    "common": "services/common/quartet_common",
    "server": "services/common/quartet_server",
    "weights": "services/common/quartet_weights",
    "broker": "services/broker/quartet_broker",
    "reward": "services/reward/quartet_reward",
    "environment": "services/environment/quartet_environment",
    "rollout": "services/rollout/quartet_rollout",
    "trainer": "services/trainer/quartet_trainer",
    "client": "client/quartet_client",
    "launcher": "deploy/local/quartet_local",
}

# The sentences that the helpers of quartet_common.errors and similar ones make of their arguments.
FORMS = {
    "invalid_argument": "{0}: got {1}; allowed: {2}",
    "PromptRefused": "{0}: got {1}; allowed: {2}",
    "not_found": "{0} '{1}' does not exist: {2}",
    "already_exists": "{0} '{1}' exists and differs: {2}",
    **dict.fromkeys(
        ("failed_precondition", "resource_exhausted", "unavailable", "aborted", "data_loss", "unimplemented"),
        "{0}: {1}",
    ),
    "permission_denied": "{0}: {1}",
    "unauthenticated": "authorization: {0}",
    "invalid_request": "{0}",
}
KEYWORDS = {"came": 1, "allowed": 2}
# These report programming errors, not errors for a user.
PROGRAMMERS = (
    "TypeError",
    "AssertionError",
    "AttributeError",
    "RecursionError",
    "EOFError",
    "RuntimeError",
    "KeyError",
)
RETURNING = ("diagnosis.py", "refusals.py")
"""Modules whose functions return messages."""
ENDINGS = ("Error", "Unavailable", "Failed", "Refused", "Failure", "BadReference", "InvalidItem", "Crashed")
LEAST_LETTERS = 8
"""A template with fewer letters only passes on another message."""
_VERBS = (
    "ask bring call choose collect copy correct delete fetch finish give install issue join leave limit make move "
    "name put raise register retry see send set start stop submit take upgrade use wake watch write"
)
CURE = re.compile(
    rf"\b(allowed|must|needs?|did you mean)\b|[;:,] (and |or )?({_VERBS.replace(' ', '|')})\b|\?$", re.IGNORECASE
)
"""Words of a message that say what is allowed or what to do."""

# Modules whose messages no user sees as they are, and where the messages appear instead.
INTERNAL = {
    "quartet_common/tensors.py": "in the sentence of who reads the tensor: '… cannot be read (…)'",
    "quartet_common/weights.py": "in the sentence of the rollout: 'manifest: …'",
    "quartet_reward/code/": "said inside the sandbox, between judge and program; part of a verdict's reason",
    "quartet_reward/math/worker.py": "in the sentence of the service: 'reference.answer: …'",
    "quartet_environment/seats.py": "in the sentence of the service: 'environment … returned …'",
    "quartet_server/worker_protocol.py": "between a service and its own worker processes",
    "quartet_reward/sandbox/": "between the reward service and its sandbox; reported as 'sandbox: …'",
    "quartet_client/models.py": "a broken tensor in an answer",
    "quartet_local/guard.py": "of the launcher's guard process",
    "quartet_trainer/batch/decode.py": "in the sentence of the batch: 'group … cannot be trained and is dropped: …'",
    "quartet_trainer/batch/layout.py": "in the sentence of the batch, as decode.py's",
    "quartet_trainer/batch/tensors.py": "in the sentence of the batch, as decode.py's",
    "quartet_trainer/learner/plugins/sharded.py": "two parts of the trainer that disagree",
    "quartet_trainer/algorithms/losses.py": "refused by the run file's model before",
    "quartet_rollout/engines/registry.py": "refused by the run file's model before",
}


@dataclass(frozen=True)
class Message:
    """An error message of the source."""

    package: str
    where: str
    template: str

    @property
    def names_its_cure(self) -> bool:
        """Whether it says what is allowed or what to do."""
        return CURE.search(self.template) is not None

    def __str__(self) -> str:
        return f"{self.where}: {self.template}"


def letters(template: str) -> int:
    """Return the number of letters in a template."""
    return len(re.findall(r"[A-Za-z]", template))


@cache
def messages() -> list[Message]:
    """Return all error messages of the services, the client and the launcher, without duplicates."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = str(path.relative_to((ROOT / folder).parent))
            if any(where.startswith(internal) for internal in INTERNAL):
                continue
            for line, template in _of(path):
                if letters(template) >= LEAST_LETTERS:
                    found.setdefault((package, template), Message(package, f"{where}:{line}", template))
    return list(found.values())


def _of(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    named = _named_texts(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None and path.name in RETURNING:
            for template in texts(node.value, named):
                yield node.lineno, template
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        is_error = name.endswith(ENDINGS) and name[:1].isupper() and name not in PROGRAMMERS
        is_error |= name == "add" and isinstance(node.func, ast.Attribute) and _is_named(node.func.value, "problems")
        if _is_log(node):
            for template in texts(node.args[0], named):
                yield node.lineno, re.sub(r"%[sdr]|%\.?\d*[fg]", "…", template)
        elif name in FORMS or is_error:
            for template in _sentences(name, node, named):
                yield node.lineno, re.sub(r"…(…)+", "…", template)


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_log(call: ast.Call) -> bool:
    """Return whether a call logs a warning or an error."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("warning", "error", "exception", "critical")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in ("log", "logger", "_log")
    )


def _sentences(name: str, call: ast.Call, named: dict[str, list[str]]) -> list[str]:
    arguments = [texts(argument, named) for argument in call.args]
    if name not in FORMS:
        # Arguments before the sentence are codes and kinds.
        return next((values for values in arguments if any(letters(text) for text in values)), [])
    parts = [["…"]] * 3
    for index, values in enumerate(arguments[:3]):
        parts[index] = values
    for keyword in call.keywords:
        if keyword.arg in KEYWORDS:
            parts[KEYWORDS[keyword.arg]] = texts(keyword.value, named)
    return [FORMS[name].format(one, two, three) for one in parts[0] for two in parts[1] for three in parts[2]]


def texts(node: ast.AST, named: dict[str, list[str]]) -> list[str]:
    """Return the possible values of an expression, with "…" for parts known only at run time."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            said = [_parts(one, named) for one in values]
            return ["".join(parts) for parts in product(*said)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [one + two for one in texts(left, named) for two in texts(right, named)]
        case ast.IfExp(body=body, orelse=orelse):
            return texts(body, named) + texts(orelse, named)
        case ast.Name(id=name) if name in named:
            return named[name]
    return ["…"]


def _parts(node: ast.AST, named: dict[str, list[str]]) -> list[str]:
    """Return the possible values of a part of an f-string: text, or the texts assigned to a name."""
    if isinstance(node, ast.FormattedValue):
        return named.get(node.value.id, ["…"]) if isinstance(node.value, ast.Name) else ["…"]
    return [node.value] if isinstance(node, ast.Constant) else ["…"]


def _named_texts(tree: ast.Module) -> dict[str, list[str]]:
    """Return the texts assigned to each name in a module."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for text in texts(node.value, {}):
                if letters(text) >= LEAST_LETTERS and " " in text:
                    found.setdefault(node.targets[0].id, []).append(text)
    return found
