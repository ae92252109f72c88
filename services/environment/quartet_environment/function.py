"""An agent, in its worker process: a function of a Python file or of a package, its parameters, its tasks."""

import asyncio
import inspect
import sys
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import copy_context
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from quartet_common.python_file import FileError, describe, load_callable
from quartet_environment.agent import Endpoint, Task

ENTRY_POINT_GROUP = "quartet.served_environments"


class Refused(Exception):
    """The function cannot be used as an environment."""


class InvalidParameter(Exception):
    """A parameter is refused."""

    def __init__(self, key: str, came: str, allowed: str):
        super().__init__(key, came, allowed)
        self.key, self.came, self.allowed = key, came, allowed


class Function:
    """`play(task, endpoint, *, parameters…)`, and the function `tasks(*, parameters…)` of the same module, if any."""

    def __init__(self, source: str):
        """Load the function.

        Args:
            source: "FILE.py:FUNCTION", or the name of an entry point.

        Raises:
            FileError: the file cannot be read, raises, or has no such function; the package cannot be imported.
            Refused: it does not take a task and an endpoint.
        """
        self.name = source
        self._play = _load(source)
        code = getattr(inspect.unwrap(self._play), "__code__", None)  # an object with __call__ has none
        self.file = code.co_filename if code else source.rpartition(":")[0]
        own = _parameters(self._play)
        if len(own) < 2 or any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in own[:2]):
            taken = ", ".join(one.name for one in own)
            raise Refused(f"'{source}' takes ({taken}); it must take (task, endpoint) first")
        module = sys.modules.get(getattr(self._play, "__module__", ""))
        found = getattr(module, "tasks", None)
        self._tasks: Callable[..., Iterable[Any]] | None = found if inspect.isroutine(found) else None
        self._taken = _named(own[2:])
        self._taken_by_tasks = _named(_parameters(self._tasks)) if self._tasks else {}
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in own)
        self._model = self._model_of_parameters()

    def _model_of_parameters(self) -> type[BaseModel]:
        hints: dict[str, Any] = {}
        for function in (self._tasks, self._play):
            try:
                hints |= typing.get_type_hints(function, include_extras=True) if function else {}
            except Exception:  # an annotation that only a type checker can resolve
                hints |= {}
        fields = {
            name: (hints.get(name, Any), ... if one.default is one.empty else one.default)
            for name, one in (self._taken_by_tasks | self._taken).items()
        }
        extra: Any = "allow" if self._takes_any else "forbid"
        config = ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
        try:
            return create_model("Parameters", __config__=config, **fields)  # type: ignore[call-overload]
        except Exception as error:
            raise Refused(f"'{self.name}': its parameters cannot be read: {error}") from error

    def description(self) -> dict[str, Any]:
        """Return the first line of the docstring, the JSON Schema of the parameters, and whether it has tasks."""
        try:
            schema = self._model.model_json_schema() if self._model.model_fields or self._takes_any else None
        except Exception:  # a type that JSON does not have
            schema = {"type": "object", "properties": {name: {} for name in self._model.model_fields}}
        text = (inspect.getdoc(self._play) or "").partition("\n")[0]
        return {"description": text, "schema": schema, "has_tasks": self._tasks is not None}

    def check(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters, validated, defaults included. Raises InvalidParameter."""
        try:
            read = self._model.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                allowed = ", ".join(self._model.model_fields) or "none"
                raise InvalidParameter(key, "an unknown parameter", f"parameters of '{self.name}': {allowed}") from None
            came = "nothing" if first["type"] == "missing" else repr(first["input"])[:80]
            raise InvalidParameter(key, came, first["msg"][0].lower() + first["msg"][1:]) from None
        return {name: getattr(read, name) for name in type(read).model_fields} | (read.model_extra or {})

    async def play(self, task: Task, endpoint: Endpoint, parameters: Mapping[str, Any]) -> Any:
        """Call the function and return what it returns. One that is not a coroutine gets a thread of its own."""
        given = {k: v for k, v in parameters.items() if k in self._taken or k not in self._taken_by_tasks}
        if inspect.iscoroutinefunction(self._play):
            return await self._play(task, endpoint, **given)
        value = await in_thread(lambda: self._play(task, endpoint, **given))
        return await value if inspect.isawaitable(value) else value

    def tasks(self, parameters: Mapping[str, Any]) -> Iterator[Any]:
        """Return the tasks. Raises Refused if it has none."""
        if self._tasks is None:
            raise Refused(f"'{self.name}' has no tasks: its module has no function `tasks`")
        given = {name: value for name, value in parameters.items() if name in self._taken_by_tasks}
        return iter(self._tasks(**given))


def lacking(point: EntryPoint) -> list[str]:
    """Return the packages that an entry point names, "module:function [package]", and that are not installed."""
    return [package for package in point.extras if find_spec(package) is None]


def _load(source: str) -> Callable[..., Any]:
    if ".py:" in source:
        return load_callable(source)
    point = next((one for one in entry_points(group=ENTRY_POINT_GROUP) if one.name == source), None)
    if point is None:
        raise FileError(f"no installed package has the environment '{source}'")
    try:
        found = point.load()
    except Exception as error:
        raise FileError(f"entry point {point.value}: {describe(error, '')['reason']}") from error
    if not callable(found):
        raise FileError(f"entry point {point.value}: it is no function")
    return found


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _named(parameters: Iterable[inspect.Parameter]) -> dict[str, inspect.Parameter]:
    return {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


async def in_thread(call: Callable[[], Any]) -> Any:
    """Call in a new thread, which nothing waits for if this is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome = (future.set_result, call())
        except StopIteration as error:  # no future takes it
            outcome = (future.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            outcome = (future.set_exception, error)
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=copy_context().run, args=(run,), daemon=True).start()
    return await future
