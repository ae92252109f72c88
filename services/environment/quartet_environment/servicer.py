"""The RPCs of EnvironmentService. The proto is their specification."""

import asyncio
import difflib
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from quartet.v1 import environment_pb2, environment_pb2_grpc

from quartet_common import tracing
from quartet_common.errors import (
    ContractError,
    failed_precondition,
    invalid_argument,
    not_found,
    resource_exhausted,
    unavailable,
)
from quartet_common.log import get_logger, log_fields
from quartet_environment import metrics
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.environments import Environment
from quartet_environment.errors import EpisodeFailed, PoolFull
from quartet_environment.messages import read_answer, read_deadline, read_parameters, read_request, task_prompt
from quartet_server.fair_queue import Admission
from quartet_server.worker_process import WorkerCommand, WorkerDied, WorkerProcess

log = get_logger(__name__)

_RETRY_SECONDS = 1.0
_MOST_LISTINGS = 4  # calls of ListTasks at once, each of which has a process
_TASKS_SECONDS = 600.0  # longest wait for one task
_PROMPTS_OF_A_MESSAGE = 64
_BYTES_OF_A_MESSAGE = 1 << 20


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """ListEnvironments, ListTasks, RunEpisode."""

    def __init__(self, environments: Mapping[str, Environment], section: EnvironmentServiceSection, ca_file: str):
        """`ca_file`: PEM of the authority of https endpoints; "": a public one."""
        self._environments, self._section, self._ca_file = environments, section, ca_file
        self._listings = 0
        self.admission = Admission(section.max_episodes)
        self.draining = False

    async def ListEnvironments(  # noqa: N802
        self, request: environment_pb2.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> environment_pb2.ListEnvironmentsResponse:
        infos = [
            environment_pb2.EnvironmentInfo(
                name=one.name,
                description=one.description,
                parameters_schema="" if one.schema is None else json.dumps(one.schema),
                has_tasks=one.has_tasks,
            )
            for one in self._environments.values()
        ]
        return environment_pb2.ListEnvironmentsResponse(environments=infos)

    async def ListTasks(  # noqa: N802
        self, request: environment_pb2.ListTasksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[environment_pb2.ListTasksResponse]:
        self._refuse_if_draining()
        environment = self._find(request.environment, "environment")
        parameters = read_parameters(request, "parameters")
        if request.limit < 0:
            raise invalid_argument("limit", request.limit, "a number of tasks; 0: all")
        if not environment.has_tasks:
            raise failed_precondition(environment.name, "it has no tasks: its module has no function `tasks`")
        if self._listings >= _MOST_LISTINGS:
            raise resource_exhausted("ListTasks", f"{_MOST_LISTINGS} calls are answered already", _RETRY_SECONDS)
        self._listings += 1
        try:
            response, size = environment_pb2.ListTasksResponse(), 0
            async for task in self._tasks(environment, parameters, request.limit):
                number = task.pop("number")
                response.prompts.append(task_prompt(environment.name, number, task["task"]))
                size += len(response.prompts[-1].task)
                if len(response.prompts) == _PROMPTS_OF_A_MESSAGE or size > _BYTES_OF_A_MESSAGE:
                    yield response
                    response, size = environment_pb2.ListTasksResponse(), 0
            if response.prompts:
                yield response
        finally:
            self._listings -= 1

    async def _tasks(
        self, environment: Environment, parameters: dict[str, Any], limit: int
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the tasks that a process of its own sends. Raises ContractError."""
        given, most = environment.command, self._section.max_tasks
        command = WorkerCommand(given.module, (*given.arguments, "--tasks"), given.variables, given.start_seconds)
        process = WorkerProcess(command)
        try:
            await process.await_ready()
            await process.send({"event": "tasks", "parameters": parameters, "limit": limit or most + 1})
            number = 0
            while True:
                async with asyncio.timeout(_TASKS_SECONDS):
                    answer = await process.receive()
                match answer["event"]:
                    case "task" if number < most:
                        yield {**answer, "number": number}
                        number += 1
                    case "task":
                        said = f"it has more than {most} tasks (environment.max_tasks); set a limit"
                        raise failed_precondition(environment.name, said)
                    case "end":
                        return
                    case "refused":
                        raise invalid_argument(f"parameters.{answer['key']}", answer["came"], answer["allowed"])
                    case _:
                        raise failed_precondition(environment.name, answer["message"])
        except WorkerDied as error:
            said = f"its tasks cannot be read: its process ended: {error}"
            raise failed_precondition(environment.name, said) from error
        except TimeoutError:
            said = f"it gave no task within {_TASKS_SECONDS:g} s"
            raise failed_precondition(environment.name, said) from None
        finally:
            await process.end()

    async def RunEpisode(  # noqa: N802
        self, request: environment_pb2.RunEpisodeRequest, context: grpc.aio.ServicerContext
    ) -> environment_pb2.RunEpisodeResponse:
        self._refuse_if_draining()
        environment = self._find(request.environment.name, "environment.name")
        sent = read_request(request, self._ca_file)
        deadline = read_deadline(request, context.time_remaining(), self._section.deadline_seconds)
        if not self.admission.try_acquire(request.run_id, 1):
            raise self._full(f"the run has its share; {self.admission.free} are left for other runs")
        key = hash(request.prompt.SerializeToString(deterministic=True))
        traced = tracing.span("play episode", request.traceparent or None)
        try:
            with traced, log_fields(run=request.run_id, episode=request.episode_id):
                return await self._play(environment, sent, deadline, key, request.run_id)
        finally:
            self.admission.release(request.run_id)

    async def _play(
        self, environment: Environment, sent: dict[str, Any], deadline: float, key: int, run: str
    ) -> environment_pb2.RunEpisodeResponse:
        began = time.monotonic()
        try:
            answer = await environment.pool.play(sent, deadline, key, run)
        except PoolFull:
            raise self._full(f"no process of '{environment.name}' can take another episode") from None
        except EpisodeFailed as error:
            message = f"environment '{environment.name}': {error.message}"
            told = {"place": error.place, "traceback": error.traceback}
            answer = {"event": "failed", "message": message, "retryable": True, **told}
        outcome = "retryable" if answer.get("retryable") else answer["event"]
        metrics.EPISODE_SECONDS.labels(environment.name, outcome).observe(time.monotonic() - began)
        if outcome == "refused":
            key_path = f"environment.parameters.{answer['key']}"
            raise invalid_argument(key_path, answer["came"], answer["allowed"])
        if outcome != "finished":
            log.warning("%s", answer["message"], extra={"retryable": answer["retryable"]})
        return read_answer(answer)

    def _find(self, name: str, field: str) -> Environment:
        """Return an environment. Raises ContractError (NOT_FOUND)."""
        found = self._environments.get(name)
        if found is None:
            close = difflib.get_close_matches(name, self._environments, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(self._environments) or 'none'}"
            raise not_found("environment", name[:200], hint)
        return found

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise unavailable("environment", "the service is shutting down")

    @staticmethod
    def _full(description: str) -> ContractError:
        return resource_exhausted("environment.max_episodes", description, _RETRY_SECONDS)
