"""The tasks of a served environment as prompts, from the environment service."""

import json
from collections.abc import Mapping
from typing import Any

import grpc
from quartet.v1 import environment_pb2, environment_pb2_grpc

from quartet_client.errors import InputError
from quartet_client.prompts import Prompt
from quartet_common.channel import connect_sync
from quartet_common.config import LoadedConfig
from quartet_common.diagnosis import Peer
from quartet_common.sections import by_name

_SECONDS = 600.0


def list_tasks(
    config: LoadedConfig, environment: str, parameters: Mapping[str, Any], limit: int, key: str
) -> list[Prompt]:
    """Return an environment's tasks, in its order.

    Args:
        config: whose `addresses.environment` is asked.
        environment: a name, or a function of a file. If it is not the run's own, each prompt names it.
        parameters: if empty, those of the run, if it is the run's.
        limit: most tasks; 0: all.
        key: the run-file key of the source, for errors.

    Raises:
        InputError: the service cannot be reached, or refuses.
    """
    run = config.run.environment
    is_runs = run is not None and run.spec_name == environment
    if run is not None and is_runs and not parameters:
        parameters = run.parameters
    own = {} if is_runs else {"environment": {**by_name(environment), "served": True, "parameters": dict(parameters)}}
    request = environment_pb2.ListTasksRequest(environment=environment, limit=limit)
    request.parameters.update(parameters)
    found: list[Prompt] = []
    address, security = config.addresses.environment, config.security
    try:
        with connect_sync(address, security, service="environment") as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            for answer in stub.ListTasks(request, timeout=_SECONDS):
                for prompt in answer.prompts:
                    fields = {"id": prompt.prompt_id, "task": json.loads(prompt.task), **own}
                    found.append(Prompt.parse(fields, f"{key}, task {len(found)}"))
    except grpc.RpcError as error:
        raise InputError(f"{key}.environment: {Peer('environment', address, security).explain(error)}") from error
    if not found:
        raise InputError(
            f"{key}.environment: '{environment}' has no tasks; allowed: one whose function `tasks` has some"
        )
    return found
