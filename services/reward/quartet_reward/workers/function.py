"""The worker process of a reward function, called with one completion at a time.

Run by `python -m quartet_reward.workers.function`. Requests and answers:

    -> {"completion": "…", "answer": "…", "prompt": "…", "messages": […] | null, "columns": {…}, "parameters": {…}}
    <- {"event": "scored", "reward": 1.0, "correct": true | null, "answer": "", "reason": ""}
    <- {"event": "none"}                           the function returned None
    <- {"event": "missing", "names": […]}          the row lacks columns that the function requires
    <- {"event": "failed", "reason": "raised KeyError: 'a'", "place": "FILE:LINE", "traceback": "…"}

With `--describe` it prints the function's arguments and description as JSON and exits.
"""

import argparse
import asyncio
import inspect
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from quartet_common.python_file import FileError, describe, load_callable
from quartet_common.text import encodable
from quartet_reward import Score
from quartet_server import worker_protocol

_GIVEN = ("completion", "prompt", "messages", "answer", "gt_answer", "completions", "prompts")
_REFERENCE = ("answer", "gt_answer")
_RETURNS = "a number, a bool, None, quartet_reward.Score"


class Refused(Exception):
    """The function cannot be used, or returned an invalid value."""


def main() -> None:
    """Load the function and serve, or describe it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--function", required=True)
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--parent", type=int)
    arguments = parser.parse_args()
    if arguments.describe:
        output, sys.stdout = sys.stdout, sys.stderr  # keep what the file prints out of the description
        try:
            description = RewardFunction(arguments.function).description()
        except (FileError, Refused) as error:
            description = {"error": str(error)}
        print(json.dumps(description), file=output)
    else:
        worker_protocol.serve(arguments.parent, lambda: RewardFunction(arguments.function).score)


class RewardFunction:
    """A reward function, `FILE.py:NAME`. It takes `completion`, or TRL's `completions`."""

    def __init__(self, path: str):
        """Load the function.

        Raises:
            FileError: the file cannot be read, raises, or has no such function.
            Refused: the function takes no completion.
        """
        self.file, _, self.name = path.rpartition(":")
        self._call = load_callable(path)
        taken = inspect.signature(self._call).parameters.values()
        self.takes_any = any(one.kind is one.VAR_KEYWORD for one in taken)
        named = [one for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self.names = [one.name for one in named]
        self.required = [one.name for one in named if one.default is one.empty]
        self.of_trl = "completions" in self.names
        if not {"completion", "completions"} & set(self.names):
            raise Refused(
                f"{self.name}({', '.join(self.names)}) takes neither 'completion' nor, as TRL's, 'completions'"
            )

    def description(self) -> dict[str, Any]:
        """Return the arguments that come from columns or parameters, those of them and of the reference that must be
        given, those of them that are read ("*": all columns), and the first line of the docstring."""
        names = [name for name in self.names if name not in _GIVEN]
        required = [name for name in self.required if name in names or name in _REFERENCE]
        description = (inspect.getdoc(self._call) or "").partition("\n")[0]
        reads = [name for name in self.names if name in names or name in _REFERENCE]
        if self.takes_any:
            reads += ["answer", "*"] if self.of_trl else ["*"]
        found = {"names": names, "required": required, "reads": reads, "takes_any": self.takes_any}
        return {**found, "description": description}

    def score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        arguments = self._arguments(request)
        if missing := [name for name in self.required if name not in arguments]:
            return {"event": "missing", "names": missing}
        try:
            value = self._call(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            return _answer(value[0] if self._is_list_of_one(value) else value)
        except Refused as error:
            code = getattr(inspect.unwrap(self._call), "__code__", None)  # an object with __call__ has none
            place = f"{code.co_filename}:{code.co_firstlineno}" if code else self.file
            return {"event": "failed", "reason": str(error), "place": place}
        except BaseException as error:  # a SystemExit of the function must not end this process
            return {"event": "failed", **describe(error, self.file)}

    def _arguments(self, request: Mapping[str, Any]) -> dict[str, Any]:
        columns = request["columns"] | request["parameters"]
        answer = request["answer"]
        given = {"answer": answer, "gt_answer": answer} if answer else {}
        completion, prompt, messages = request["completion"], request["prompt"], request["messages"]
        if self.of_trl:
            # Lists of one text each; of one list of messages each where the prompt is a chat.
            texts = [completion] if messages is None else [[{"role": "assistant", "content": completion}]]
            own = {"completions": texts, "prompts": [prompt] if messages is None else [messages]}
            row = {name: [value] for name, value in (given | request["columns"]).items()} | request["parameters"]
            return {name: value for name, value in (row | own).items() if name in self.names or self.takes_any}
        own = {"completion": completion, "prompt": prompt, "messages": messages}
        named = {name: value for name, value in (given | columns | own).items() if name in self.names}
        return (columns | named) if self.takes_any else named

    def _is_list_of_one(self, value: Any) -> bool:
        if not self.of_trl:
            return False
        if not isinstance(value, list | tuple) and not hasattr(value, "tolist"):
            raise Refused(f"returned {_shown(value)}; allowed, as it takes 'completions': a list of as many numbers")
        if len(value) != 1:
            raise Refused(f"returned {len(value)} numbers for 1 completion")
        return True


async def _awaited(value: Any) -> Any:
    return await value


def _answer(value: Any) -> dict[str, Any]:
    if value is None:
        return {"event": "none"}
    score = value if isinstance(value, Score) else None
    number = _number(value if score is None else score.reward)
    correct = number if isinstance(number, bool) else None if score is None else score.correct
    if correct is not None and not isinstance(correct, bool):
        raise Refused(f"returned a Score whose correct is {_shown(correct)}; allowed: True, False, None")
    answer, reason = (str(score.answer), str(score.reason)) if score is not None else ("", "")
    return {"event": "scored", "reward": float(number), "correct": correct, "answer": answer, "reason": reason}


def _number(value: Any) -> float | bool:
    number = value.item() if hasattr(value, "item") and callable(value.item) else value  # of numpy and torch
    if isinstance(number, int | float) and math.isfinite(number):
        return number
    raise Refused(f"returned {_shown(value)}; allowed: {_RETURNS}; numbers are finite")


def _shown(value: Any) -> str:
    return f"{encodable(repr(value), 80)} ({type(value).__name__})"


if __name__ == "__main__":
    main()
