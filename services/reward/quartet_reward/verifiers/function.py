"""The verifier of a user's reward function, `FILE.py:NAME`, which runs in worker processes."""

import json
import os
from typing import Any

from pydantic import ConfigDict, model_validator
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import SPECIAL_TOKENS, without_trailing_special_tokens
from quartet_reward.config import RewardSection
from quartet_reward.errors import InvalidItem, VerifierCrashed
from quartet_reward.verifiers.base import Parameters, Tools, Verdict
from quartet_reward.workers.pool import TaskTimedOut, WorkerPool
from quartet_server.worker_process import WorkerCommand, WorkerDied, describe_function

_MODULE = "quartet_reward.workers.function"
_START_SECONDS = 120.0  # the file may import torch
_OUTCOMES = {
    None: reward_pb2.OUTCOME_UNJUDGED,
    True: reward_pb2.OUTCOME_CORRECT,
    False: reward_pb2.OUTCOME_INCORRECT,
}


class RewardFunction:
    """Calls the function with the completion, the prompt, the reference answer and the row's columns, by name."""

    def __init__(self, path: str, field: str, section: RewardSection):
        """`field`: the key of the run file that names `path`.

        Raises:
            ConfigError: the file cannot be read, raises, or has no such function; or that takes no completion.
        """
        self.name = path
        signature = describe_function(_MODULE, path, field, _START_SECONDS, f"{_START_SECONDS:g} s")
        self.description = signature["description"] or "A reward function."
        self.required: list[str] = signature["required"]
        self.reads: list[str] = signature["reads"]
        self.parameters = _parameters(path, signature["names"], signature["takes_any"])
        # With the service's environment: it may need the API key of a judge.
        command = WorkerCommand(_MODULE, [f"--function={path}"], os.environ, _START_SECONDS, may_wait=True)
        self.pool = WorkerPool(path, command, section.function_seconds, section.queue_seconds, section.function_workers)

    async def verify(self, item: reward_pb2.ScoreItem, parameters: Any, tools: Tools) -> Verdict:
        request = {
            "completion": without_trailing_special_tokens(item.completion, SPECIAL_TOKENS),
            "answer": item.reference.answer,
            "prompt": item.prompt,
            "messages": _json_of(item, "messages", list) if item.messages else None,
            "columns": _json_of(item, "columns", dict) if item.columns else {},
            "parameters": parameters.model_dump(),
        }
        try:
            answer = await self.pool.run(request)
        except TaskTimedOut as error:
            raise self._crashed(f"took too long: {error} (reward.function_seconds)") from error
        except WorkerDied as error:
            raise self._crashed(f"{'ended its process' if error.crashed else 'failed'}: {error}") from error
        return self._verdict(answer)

    def _verdict(self, answer: dict[str, Any]) -> Verdict:
        match answer["event"]:
            case "scored":
                correct = answer["correct"]
                return Verdict(
                    answer["reward"],
                    _OUTCOMES[correct],
                    answer["reason"],
                    answer["answer"],
                    ans_acc=None if correct is None else float(correct),
                )
            case "none":
                return Verdict(None, reward_pb2.OUTCOME_UNSPECIFIED, "no verdict")
            case "missing":
                raise InvalidItem(
                    f"'{self.name}' requires {', '.join(answer['names'])}, which the prompt's row does not have"
                )
            case _:
                raise self._crashed(answer["reason"], answer["place"], answer.get("traceback", ""))

    def _crashed(self, what: str, place: str = "", traceback: str = "") -> VerifierCrashed:
        where = f" ({place})" if place else ""
        return VerifierCrashed(f"verifier '{self.name}' {what}{where}", place, traceback)


def _parameters(path: str, names: list[str], takes_any: bool) -> type[Parameters]:
    class FunctionParameters(Parameters):
        """Arguments of the function, by name."""

        model_config = ConfigDict(extra="allow")

        @model_validator(mode="after")
        def _known(self) -> "FunctionParameters":
            unknown = [name for name in self.model_extra or () if name not in names and not takes_any]
            if unknown:
                allowed = ", ".join(names) or "none"
                raise ValueError(f"'{path}' takes no argument '{unknown[0]}'; allowed: {allowed}")
            return self

    return FunctionParameters


def _json_of(item: reward_pb2.ScoreItem, field: str, kind: type) -> Any:
    text = getattr(item, field)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        allowed = "a JSON object" if kind is dict else "a JSON array"
        raise InvalidItem(f"item.{field}: got {text[:80]!r}; allowed: {allowed}")
    return value
