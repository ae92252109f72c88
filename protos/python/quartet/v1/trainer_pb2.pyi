import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINER_PHASE_UNSPECIFIED: _ClassVar[TrainerPhase]
    TRAINER_PHASE_STARTING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_WAITING_FOR_BROKER: _ClassVar[TrainerPhase]
    TRAINER_PHASE_WAITING_FOR_BATCH: _ClassVar[TrainerPhase]
    TRAINER_PHASE_TRAINING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_PUBLISHING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_EVALUATING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_CHECKPOINTING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_FINISHED: _ClassVar[TrainerPhase]
    TRAINER_PHASE_PAUSED: _ClassVar[TrainerPhase]
TRAINER_PHASE_UNSPECIFIED: TrainerPhase
TRAINER_PHASE_STARTING: TrainerPhase
TRAINER_PHASE_WAITING_FOR_BROKER: TrainerPhase
TRAINER_PHASE_WAITING_FOR_BATCH: TrainerPhase
TRAINER_PHASE_TRAINING: TrainerPhase
TRAINER_PHASE_PUBLISHING: TrainerPhase
TRAINER_PHASE_EVALUATING: TrainerPhase
TRAINER_PHASE_CHECKPOINTING: TrainerPhase
TRAINER_PHASE_FINISHED: TrainerPhase
TRAINER_PHASE_PAUSED: TrainerPhase

class TrainerServiceGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServiceGetStatusResponse(_message.Message):
    __slots__ = ("run_id", "phase", "step", "checkpoint_step", "published_version", "algorithm", "plugin", "world_size", "phase_seconds", "waiting_for", "group_epoch", "session_epoch", "warning")
    class PhaseSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_VERSION_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: TrainerPhase
    step: int
    checkpoint_step: int
    published_version: int
    algorithm: str
    plugin: str
    world_size: int
    phase_seconds: _containers.ScalarMap[str, float]
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    group_epoch: int
    session_epoch: int
    warning: str
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[_Union[TrainerPhase, str]] = ..., step: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., published_version: _Optional[int] = ..., algorithm: _Optional[str] = ..., plugin: _Optional[str] = ..., world_size: _Optional[int] = ..., phase_seconds: _Optional[_Mapping[str, float]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., group_epoch: _Optional[int] = ..., session_epoch: _Optional[int] = ..., warning: _Optional[str] = ...) -> None: ...

class WatchMetricsRequest(_message.Message):
    __slots__ = ("after_step",)
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    after_step: int
    def __init__(self, after_step: _Optional[int] = ...) -> None: ...

class WatchMetricsResponse(_message.Message):
    __slots__ = ("step", "at", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    at: _timestamp_pb2.Timestamp
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("step", "path", "saved_at", "elapsed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    saved_at: _timestamp_pb2.Timestamp
    elapsed: _duration_pb2.Duration
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ..., saved_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("reason", "limit")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    limit: _duration_pb2.Duration
    def __init__(self, reason: _Optional[str] = ..., limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...
