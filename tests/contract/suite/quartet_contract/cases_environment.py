"""EnvironmentService. Its cases play the environment of contract_agent.py."""

import json

import grpc
from quartet.v1 import environment_pb2 as pb
from quartet.v1 import experience_pb2

from quartet_common.durations import to_duration
from quartet_contract.cases import Bad, Case, Good, NoBadInput, Refused
from quartet_contract.world import NotHere, World

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
_DEADLINE = 1.0  # seconds


def environment(w: World) -> str:
    """Return the name of the cases' environment. Raises NotHere."""
    listed = w.call("EnvironmentService.ListEnvironments", pb.ListEnvironmentsRequest())
    for one in listed.environments:
        if one.name == "contract" or one.name.endswith("contract_agent.py:play"):
            return one.name
    raise NotHere("it needs the environment of quartet_contract/contract_agent.py, by this file or as 'contract'")


def episode(act: str = "reward", name: str = "", prompt: experience_pb2.Prompt | None = None, **fields):
    """Return what builds a request for an episode whose agent does `act`."""

    def build(w: World) -> pb.RunEpisodeRequest:
        parameters = fields.get("parameters", {})
        request = pb.RunEpisodeRequest(
            episode_id=w.name,
            environment=experience_pb2.EnvironmentSpec(name=name or environment(w), served=True),
            prompt=prompt or experience_pb2.Prompt(prompt_id="p", task=json.dumps({"act": act})),
            endpoint=pb.Endpoint(base_url=fields.get("base_url", "http://127.0.0.1:9/v1"), api_key="k", model="policy"),
            deadline=to_duration(fields.get("deadline", 30.0)),
        )
        request.environment.parameters.update(parameters)
        return request

    return build


def tasks(name: str = "", limit: int = 0, **parameters):
    def build(w: World) -> pb.ListTasksRequest:
        request = pb.ListTasksRequest(environment=name or environment(w), limit=limit)
        request.parameters.update(parameters)
        return request

    return build


def alphabetical(w, answer):
    names = [one.name for one in answer.environments]
    assert names == sorted(names) and environment(w) in names
    for one in answer.environments:
        assert not one.parameters_schema or json.loads(one.parameters_schema)["type"] == "object"


def named(*ids: str):
    def check(w, answers):
        prompts = [prompt for answer in answers for prompt in answer.prompts]
        assert [prompt.prompt_id for prompt in prompts] == list(ids)
        assert all(json.loads(prompt.task)["act"] == "reward" for prompt in prompts)

    return check


def rewarded(value: float):
    def check(w, answer):
        (seat,) = answer.finished.seats
        assert seat.trainable and sum(one.value * (one.weight or 1.0) for one in seat.rewards) == value

    return check


def failed(retryable: bool):
    def check(w, answer):
        assert answer.WhichOneof("result") == "failure", answer
        assert answer.failure.message and answer.failure.retryable is retryable

    return check


def after_one_given_up(w: World) -> pb.RunEpisodeRequest:
    request = episode("hang")(w)
    try:
        w.call("EnvironmentService.RunEpisode", request, timeout=_DEADLINE)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    return episode()(w)


CASES: dict[str, list[Case]] = {
    "EnvironmentService.ListEnvironments": [
        Good("all", lambda w: pb.ListEnvironmentsRequest(), alphabetical),
        NoBadInput("the request has no field, and the list is there in every state"),
    ],
    "EnvironmentService.ListTasks": [
        Good("all in their order", tasks(), named("first", "second")),
        Good("the first of them", tasks(limit=1), named("first")),
        Bad("an unknown environment", tasks("no such"), NOT_FOUND, "no such"),
        Bad("an unknown parameter", tasks(nothing=1.0), INVALID, "parameters.nothing"),
        Bad("a negative limit", tasks(limit=-1), INVALID, "limit"),
    ],
    "EnvironmentService.RunEpisode": [
        Good("a number is its reward", episode(), rewarded(0.5)),
        Good("with a parameter", episode(parameters={"scale": 3.0}), rewarded(1.5)),
        Good("after a call that was given up", after_one_given_up, rewarded(0.5)),
        Refused("an agent that raises has no reward", episode("raise"), failed(retryable=False)),
        Refused("an agent that returns NaN has no reward", episode("nan"), failed(retryable=False)),
        Refused("an agent that does not end is ended", episode("hang", deadline=_DEADLINE), failed(retryable=True)),
        Bad("an unknown environment", episode(name="no such"), NOT_FOUND, "no such"),
        Bad("a parameter of another type", episode(parameters={"scale": "much"}), INVALID, "parameters.scale"),
        Bad("no endpoint", episode(base_url=""), INVALID, "endpoint.base_url"),
        Bad("a task that is no object", episode(prompt=experience_pb2.Prompt(task="[1]")), INVALID, "prompt.task"),
    ],
}
