import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from quartet.v1 import experience_pb2 as _experience_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("environments",)
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentInfo]
    def __init__(self, environments: _Optional[_Iterable[_Union[EnvironmentInfo, _Mapping]]] = ...) -> None: ...

class EnvironmentInfo(_message.Message):
    __slots__ = ("name", "description", "parameters_schema", "has_tasks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    HAS_TASKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_schema: str
    has_tasks: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_schema: _Optional[str] = ..., has_tasks: _Optional[bool] = ...) -> None: ...

class ListTasksRequest(_message.Message):
    __slots__ = ("environment", "parameters", "limit")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    parameters: _struct_pb2.Struct
    limit: int
    def __init__(self, environment: _Optional[str] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class ListTasksResponse(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[_experience_pb2.Prompt]
    def __init__(self, prompts: _Optional[_Iterable[_Union[_experience_pb2.Prompt, _Mapping]]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("base_url", "api_key", "model")
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    API_KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    base_url: str
    api_key: str
    model: str
    def __init__(self, base_url: _Optional[str] = ..., api_key: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class RunEpisodeRequest(_message.Message):
    __slots__ = ("episode_id", "run_id", "environment", "prompt", "endpoint", "sampling", "deadline", "index", "traceparent")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    run_id: str
    environment: _experience_pb2.EnvironmentSpec
    prompt: _experience_pb2.Prompt
    endpoint: Endpoint
    sampling: _experience_pb2.SamplingParams
    deadline: _duration_pb2.Duration
    index: int
    traceparent: str
    def __init__(self, episode_id: _Optional[str] = ..., run_id: _Optional[str] = ..., environment: _Optional[_Union[_experience_pb2.EnvironmentSpec, _Mapping]] = ..., prompt: _Optional[_Union[_experience_pb2.Prompt, _Mapping]] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., sampling: _Optional[_Union[_experience_pb2.SamplingParams, _Mapping]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., index: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class RunEpisodeResponse(_message.Message):
    __slots__ = ("finished", "failure")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    finished: EpisodeResult
    failure: EpisodeFailure
    def __init__(self, finished: _Optional[_Union[EpisodeResult, _Mapping]] = ..., failure: _Optional[_Union[EpisodeFailure, _Mapping]] = ...) -> None: ...

class EpisodeResult(_message.Message):
    __slots__ = ("seats", "notes")
    SEATS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    seats: _containers.RepeatedCompositeFieldContainer[SeatResult]
    notes: str
    def __init__(self, seats: _Optional[_Iterable[_Union[SeatResult, _Mapping]]] = ..., notes: _Optional[str] = ...) -> None: ...

class SeatResult(_message.Message):
    __slots__ = ("name", "trainable", "rewards", "sessions", "turns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    name: str
    trainable: bool
    rewards: _containers.RepeatedCompositeFieldContainer[EpisodeReward]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    turns: _containers.RepeatedCompositeFieldContainer[TurnReward]
    def __init__(self, name: _Optional[str] = ..., trainable: _Optional[bool] = ..., rewards: _Optional[_Iterable[_Union[EpisodeReward, _Mapping]]] = ..., sessions: _Optional[_Iterable[str]] = ..., turns: _Optional[_Iterable[_Union[TurnReward, _Mapping]]] = ...) -> None: ...

class EpisodeReward(_message.Message):
    __slots__ = ("name", "value", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    weight: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class TurnReward(_message.Message):
    __slots__ = ("turn", "value")
    TURN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    turn: int
    value: float
    def __init__(self, turn: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class EpisodeFailure(_message.Message):
    __slots__ = ("message", "retryable", "place", "traceback")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    message: str
    retryable: bool
    place: str
    traceback: str
    def __init__(self, message: _Optional[str] = ..., retryable: _Optional[bool] = ..., place: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...
