import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from quartet.v1 import common_pb2 as _common_pb2
from quartet.v1 import experience_pb2 as _experience_pb2
from quartet.v1 import reward_pb2 as _reward_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_ORDER_UNSPECIFIED: _ClassVar[LeaseOrder]
    LEASE_ORDER_FIFO: _ClassVar[LeaseOrder]
    LEASE_ORDER_FRESH_FIRST: _ClassVar[LeaseOrder]

class PartialBatchPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARTIAL_BATCH_POLICY_UNSPECIFIED: _ClassVar[PartialBatchPolicy]
    PARTIAL_BATCH_POLICY_DROP: _ClassVar[PartialBatchPolicy]
    PARTIAL_BATCH_POLICY_TRAIN: _ClassVar[PartialBatchPolicy]

class LongPromptPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LONG_PROMPT_POLICY_UNSPECIFIED: _ClassVar[LongPromptPolicy]
    LONG_PROMPT_POLICY_REFUSE: _ClassVar[LongPromptPolicy]
    LONG_PROMPT_POLICY_TRUNCATE_LEFT: _ClassVar[LongPromptPolicy]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_ACTIVE: _ClassVar[RunState]
    RUN_STATE_SUCCEEDED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
    RUN_STATE_CANCELLED: _ClassVar[RunState]

class RunEnding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_ENDING_UNSPECIFIED: _ClassVar[RunEnding]
    RUN_ENDING_MAX_STEPS: _ClassVar[RunEnding]
    RUN_ENDING_DATA: _ClassVar[RunEnding]
    RUN_ENDING_EARLY_STOP: _ClassVar[RunEnding]
    RUN_ENDING_REQUESTED: _ClassVar[RunEnding]
    RUN_ENDING_DEAD_PROMPTS: _ClassVar[RunEnding]
    RUN_ENDING_INVALID_GROUPS: _ClassVar[RunEnding]

class CurriculumUnit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CURRICULUM_UNIT_UNSPECIFIED: _ClassVar[CurriculumUnit]
    CURRICULUM_UNIT_PROMPT: _ClassVar[CurriculumUnit]
    CURRICULUM_UNIT_SOURCE: _ClassVar[CurriculumUnit]

class GateReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GATE_REASON_UNSPECIFIED: _ClassVar[GateReason]
    GATE_REASON_STALENESS: _ClassVar[GateReason]
    GATE_REASON_MEMORY: _ClassVar[GateReason]
    GATE_REASON_NO_PROMPTS: _ClassVar[GateReason]
    GATE_REASON_FINISHED: _ClassVar[GateReason]
    GATE_REASON_SHARE: _ClassVar[GateReason]

class PutOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_OUTCOME_UNSPECIFIED: _ClassVar[PutOutcome]
    PUT_OUTCOME_ACCEPTED: _ClassVar[PutOutcome]
    PUT_OUTCOME_DUPLICATE: _ClassVar[PutOutcome]
    PUT_OUTCOME_LEASE_LOST: _ClassVar[PutOutcome]
    PUT_OUTCOME_STALE: _ClassVar[PutOutcome]
    PUT_OUTCOME_NO_ROOM: _ClassVar[PutOutcome]
    PUT_OUTCOME_FINISHED: _ClassVar[PutOutcome]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_JOINING: _ClassVar[MemberState]
    MEMBER_STATE_ACTIVE: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    GROUP_STATE_QUEUED: _ClassVar[GroupState]
    GROUP_STATE_LEASED: _ClassVar[GroupState]
    GROUP_STATE_READY: _ClassVar[GroupState]
    GROUP_STATE_LEASED_TO_TRAINER: _ClassVar[GroupState]
    GROUP_STATE_TRAINED: _ClassVar[GroupState]
    GROUP_STATE_COMMITTED: _ClassVar[GroupState]
    GROUP_STATE_DROPPED: _ClassVar[GroupState]
    GROUP_STATE_DEAD: _ClassVar[GroupState]
    GROUP_STATE_DELIVERED: _ClassVar[GroupState]

class GroupMomentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_MOMENT_KIND_UNSPECIFIED: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_SUBMITTED: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_LEASED: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_RETURNED: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_PUT: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_IN_BATCH: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_COMMITTED: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_DROPPED: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_DELIVERED: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_DEAD: _ClassVar[GroupMomentKind]
    GROUP_MOMENT_KIND_REQUEUED: _ClassVar[GroupMomentKind]
LEASE_ORDER_UNSPECIFIED: LeaseOrder
LEASE_ORDER_FIFO: LeaseOrder
LEASE_ORDER_FRESH_FIRST: LeaseOrder
PARTIAL_BATCH_POLICY_UNSPECIFIED: PartialBatchPolicy
PARTIAL_BATCH_POLICY_DROP: PartialBatchPolicy
PARTIAL_BATCH_POLICY_TRAIN: PartialBatchPolicy
LONG_PROMPT_POLICY_UNSPECIFIED: LongPromptPolicy
LONG_PROMPT_POLICY_REFUSE: LongPromptPolicy
LONG_PROMPT_POLICY_TRUNCATE_LEFT: LongPromptPolicy
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_ACTIVE: RunState
RUN_STATE_SUCCEEDED: RunState
RUN_STATE_FAILED: RunState
RUN_STATE_CANCELLED: RunState
RUN_ENDING_UNSPECIFIED: RunEnding
RUN_ENDING_MAX_STEPS: RunEnding
RUN_ENDING_DATA: RunEnding
RUN_ENDING_EARLY_STOP: RunEnding
RUN_ENDING_REQUESTED: RunEnding
RUN_ENDING_DEAD_PROMPTS: RunEnding
RUN_ENDING_INVALID_GROUPS: RunEnding
CURRICULUM_UNIT_UNSPECIFIED: CurriculumUnit
CURRICULUM_UNIT_PROMPT: CurriculumUnit
CURRICULUM_UNIT_SOURCE: CurriculumUnit
GATE_REASON_UNSPECIFIED: GateReason
GATE_REASON_STALENESS: GateReason
GATE_REASON_MEMORY: GateReason
GATE_REASON_NO_PROMPTS: GateReason
GATE_REASON_FINISHED: GateReason
GATE_REASON_SHARE: GateReason
PUT_OUTCOME_UNSPECIFIED: PutOutcome
PUT_OUTCOME_ACCEPTED: PutOutcome
PUT_OUTCOME_DUPLICATE: PutOutcome
PUT_OUTCOME_LEASE_LOST: PutOutcome
PUT_OUTCOME_STALE: PutOutcome
PUT_OUTCOME_NO_ROOM: PutOutcome
PUT_OUTCOME_FINISHED: PutOutcome
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_JOINING: MemberState
MEMBER_STATE_ACTIVE: MemberState
MEMBER_STATE_DRAINING: MemberState
GROUP_STATE_UNSPECIFIED: GroupState
GROUP_STATE_QUEUED: GroupState
GROUP_STATE_LEASED: GroupState
GROUP_STATE_READY: GroupState
GROUP_STATE_LEASED_TO_TRAINER: GroupState
GROUP_STATE_TRAINED: GroupState
GROUP_STATE_COMMITTED: GroupState
GROUP_STATE_DROPPED: GroupState
GROUP_STATE_DEAD: GroupState
GROUP_STATE_DELIVERED: GroupState
GROUP_MOMENT_KIND_UNSPECIFIED: GroupMomentKind
GROUP_MOMENT_KIND_SUBMITTED: GroupMomentKind
GROUP_MOMENT_KIND_LEASED: GroupMomentKind
GROUP_MOMENT_KIND_RETURNED: GroupMomentKind
GROUP_MOMENT_KIND_PUT: GroupMomentKind
GROUP_MOMENT_KIND_IN_BATCH: GroupMomentKind
GROUP_MOMENT_KIND_COMMITTED: GroupMomentKind
GROUP_MOMENT_KIND_DROPPED: GroupMomentKind
GROUP_MOMENT_KIND_DELIVERED: GroupMomentKind
GROUP_MOMENT_KIND_DEAD: GroupMomentKind
GROUP_MOMENT_KIND_REQUEUED: GroupMomentKind

class Curriculum(_message.Message):
    __slots__ = ("by", "window", "solved_above", "hopeless_below", "floor")
    BY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SOLVED_ABOVE_FIELD_NUMBER: _ClassVar[int]
    HOPELESS_BELOW_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    by: CurriculumUnit
    window: int
    solved_above: float
    hopeless_below: float
    floor: float
    def __init__(self, by: _Optional[_Union[CurriculumUnit, str]] = ..., window: _Optional[int] = ..., solved_above: _Optional[float] = ..., hopeless_below: _Optional[float] = ..., floor: _Optional[float] = ...) -> None: ...

class RunSpec(_message.Message):
    __slots__ = ("run_id", "group_size", "groups_per_step", "max_staleness", "lease_order", "partial_batch", "max_deliveries", "max_queued_prompts", "max_experience_bytes", "prompt_lease_ttl", "member_ttl", "result_ttl", "max_steps", "sampling", "evaluation_sampling", "verifiers", "system_prompt", "max_prompt_tokens", "labels", "environment", "temperature_schedule", "long_prompts", "sampling_masks", "router_replay", "add_special_tokens", "teachers", "curriculum")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ORDER_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_EXPERIENCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_TTL_FIELD_NUMBER: _ClassVar[int]
    RESULT_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    LONG_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASKS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_REPLAY_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEACHERS_FIELD_NUMBER: _ClassVar[int]
    CURRICULUM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_size: int
    groups_per_step: int
    max_staleness: int
    lease_order: LeaseOrder
    partial_batch: PartialBatchPolicy
    max_deliveries: int
    max_queued_prompts: int
    max_experience_bytes: int
    prompt_lease_ttl: _duration_pb2.Duration
    member_ttl: _duration_pb2.Duration
    result_ttl: _duration_pb2.Duration
    max_steps: int
    sampling: _experience_pb2.SamplingParams
    evaluation_sampling: _experience_pb2.SamplingParams
    verifiers: _containers.RepeatedCompositeFieldContainer[_reward_pb2.VerifierSpec]
    system_prompt: str
    max_prompt_tokens: int
    labels: _containers.ScalarMap[str, str]
    environment: _experience_pb2.EnvironmentSpec
    temperature_schedule: _experience_pb2.TemperatureSchedule
    long_prompts: LongPromptPolicy
    sampling_masks: bool
    router_replay: bool
    add_special_tokens: bool
    teachers: _containers.RepeatedScalarFieldContainer[str]
    curriculum: Curriculum
    def __init__(self, run_id: _Optional[str] = ..., group_size: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., max_staleness: _Optional[int] = ..., lease_order: _Optional[_Union[LeaseOrder, str]] = ..., partial_batch: _Optional[_Union[PartialBatchPolicy, str]] = ..., max_deliveries: _Optional[int] = ..., max_queued_prompts: _Optional[int] = ..., max_experience_bytes: _Optional[int] = ..., prompt_lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., member_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., result_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_steps: _Optional[int] = ..., sampling: _Optional[_Union[_experience_pb2.SamplingParams, _Mapping]] = ..., evaluation_sampling: _Optional[_Union[_experience_pb2.SamplingParams, _Mapping]] = ..., verifiers: _Optional[_Iterable[_Union[_reward_pb2.VerifierSpec, _Mapping]]] = ..., system_prompt: _Optional[str] = ..., max_prompt_tokens: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., environment: _Optional[_Union[_experience_pb2.EnvironmentSpec, _Mapping]] = ..., temperature_schedule: _Optional[_Union[_experience_pb2.TemperatureSchedule, _Mapping]] = ..., long_prompts: _Optional[_Union[LongPromptPolicy, str]] = ..., sampling_masks: _Optional[bool] = ..., router_replay: _Optional[bool] = ..., add_special_tokens: _Optional[bool] = ..., teachers: _Optional[_Iterable[str]] = ..., curriculum: _Optional[_Union[Curriculum, _Mapping]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("spec", "state", "reason", "created_at", "policy_version", "committed_step", "prompts_ended", "stats", "ending", "made_by", "trained_by", "newest_data_pass", "sources")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_ENDED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    MADE_BY_FIELD_NUMBER: _ClassVar[int]
    TRAINED_BY_FIELD_NUMBER: _ClassVar[int]
    NEWEST_DATA_PASS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    spec: RunSpec
    state: RunState
    reason: str
    created_at: _timestamp_pb2.Timestamp
    policy_version: int
    committed_step: int
    prompts_ended: bool
    stats: RunStats
    ending: RunEnding
    made_by: str
    trained_by: str
    newest_data_pass: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceStats]
    def __init__(self, spec: _Optional[_Union[RunSpec, _Mapping]] = ..., state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., policy_version: _Optional[int] = ..., committed_step: _Optional[int] = ..., prompts_ended: _Optional[bool] = ..., stats: _Optional[_Union[RunStats, _Mapping]] = ..., ending: _Optional[_Union[RunEnding, str]] = ..., made_by: _Optional[str] = ..., trained_by: _Optional[str] = ..., newest_data_pass: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceStats, _Mapping]]] = ...) -> None: ...

class SourceStats(_message.Message):
    __slots__ = ("name", "used", "solved", "hopeless", "groups", "accuracy")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    SOLVED_FIELD_NUMBER: _ClassVar[int]
    HOPELESS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    name: str
    used: int
    solved: int
    hopeless: int
    groups: int
    accuracy: float
    def __init__(self, name: _Optional[str] = ..., used: _Optional[int] = ..., solved: _Optional[int] = ..., hopeless: _Optional[int] = ..., groups: _Optional[int] = ..., accuracy: _Optional[float] = ...) -> None: ...

class RunStats(_message.Message):
    __slots__ = ("queued", "leased", "ready", "leased_to_trainer", "trained", "committed", "dropped", "stale", "dead", "redelivered", "duplicates", "experience_bytes", "untrained_in_flight", "submitted", "dead_training", "skipped")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEASED_TO_TRAINER_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    REDELIVERED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    EXPERIENCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNTRAINED_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    DEAD_TRAINING_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    queued: int
    leased: int
    ready: int
    leased_to_trainer: int
    trained: int
    committed: int
    dropped: int
    stale: int
    dead: int
    redelivered: int
    duplicates: int
    experience_bytes: int
    untrained_in_flight: int
    submitted: int
    dead_training: int
    skipped: int
    def __init__(self, queued: _Optional[int] = ..., leased: _Optional[int] = ..., ready: _Optional[int] = ..., leased_to_trainer: _Optional[int] = ..., trained: _Optional[int] = ..., committed: _Optional[int] = ..., dropped: _Optional[int] = ..., stale: _Optional[int] = ..., dead: _Optional[int] = ..., redelivered: _Optional[int] = ..., duplicates: _Optional[int] = ..., experience_bytes: _Optional[int] = ..., untrained_in_flight: _Optional[int] = ..., submitted: _Optional[int] = ..., dead_training: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("spec", "extend")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    spec: RunSpec
    extend: bool
    def __init__(self, spec: _Optional[_Union[RunSpec, _Mapping]] = ..., extend: _Optional[bool] = ...) -> None: ...

class CreateRunResponse(_message.Message):
    __slots__ = ("run", "created")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    run: Run
    created: bool
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., created: _Optional[bool] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run", "members")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    run: Run
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ("limit", "page_token")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    limit: int
    page_token: str
    def __init__(self, limit: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs", "next_page_token")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    next_page_token: str
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class FinishRunRequest(_message.Message):
    __slots__ = ("run_id", "state", "reason", "ending", "committed_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: RunState
    reason: str
    ending: RunEnding
    committed_step: int
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ..., ending: _Optional[_Union[RunEnding, str]] = ..., committed_step: _Optional[int] = ...) -> None: ...

class FinishRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class DeleteRunRequest(_message.Message):
    __slots__ = ("run_id", "force")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    force: bool
    def __init__(self, run_id: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DeleteRunResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: _Optional[bool] = ...) -> None: ...

class SubmitPromptsRequest(_message.Message):
    __slots__ = ("run_id", "instances", "evaluation_set", "follows_instance_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SET_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    instances: _containers.RepeatedCompositeFieldContainer[_experience_pb2.PromptInstance]
    evaluation_set: str
    follows_instance_id: str
    def __init__(self, run_id: _Optional[str] = ..., instances: _Optional[_Iterable[_Union[_experience_pb2.PromptInstance, _Mapping]]] = ..., evaluation_set: _Optional[str] = ..., follows_instance_id: _Optional[str] = ...) -> None: ...

class SubmitPromptsResponse(_message.Message):
    __slots__ = ("accepted", "duplicates")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    duplicates: int
    def __init__(self, accepted: _Optional[int] = ..., duplicates: _Optional[int] = ...) -> None: ...

class EndPromptsRequest(_message.Message):
    __slots__ = ("run_id", "follows_instance_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    follows_instance_id: str
    def __init__(self, run_id: _Optional[str] = ..., follows_instance_id: _Optional[str] = ...) -> None: ...

class EndPromptsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromptLease(_message.Message):
    __slots__ = ("lease_id", "instance", "attempt", "expires_at", "unscored")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    instance: _experience_pb2.PromptInstance
    attempt: int
    expires_at: _timestamp_pb2.Timestamp
    unscored: bool
    def __init__(self, lease_id: _Optional[str] = ..., instance: _Optional[_Union[_experience_pb2.PromptInstance, _Mapping]] = ..., attempt: _Optional[int] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., unscored: _Optional[bool] = ...) -> None: ...

class LeasePromptsRequest(_message.Message):
    __slots__ = ("run_id", "holder", "max_prompts", "wait", "policy_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    holder: str
    max_prompts: int
    wait: _duration_pb2.Duration
    policy_version: int
    def __init__(self, run_id: _Optional[str] = ..., holder: _Optional[str] = ..., max_prompts: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., policy_version: _Optional[int] = ...) -> None: ...

class LeasePromptsResponse(_message.Message):
    __slots__ = ("leases", "gate", "policy_version")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[PromptLease]
    gate: GateReason
    policy_version: int
    def __init__(self, leases: _Optional[_Iterable[_Union[PromptLease, _Mapping]]] = ..., gate: _Optional[_Union[GateReason, str]] = ..., policy_version: _Optional[int] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("run_id", "lease_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("lost", "expires_at")
    LOST_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, lost: _Optional[_Iterable[str]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class LeaseRelease(_message.Message):
    __slots__ = ("lease_id", "failure", "permanent", "unscored")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PERMANENT_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    failure: str
    permanent: bool
    unscored: bytes
    def __init__(self, lease_id: _Optional[str] = ..., failure: _Optional[str] = ..., permanent: _Optional[bool] = ..., unscored: _Optional[bytes] = ...) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("run_id", "releases")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    releases: _containers.RepeatedCompositeFieldContainer[LeaseRelease]
    def __init__(self, run_id: _Optional[str] = ..., releases: _Optional[_Iterable[_Union[LeaseRelease, _Mapping]]] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ("requeued", "dead", "lost")
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    requeued: int
    dead: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requeued: _Optional[int] = ..., dead: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class GetUnscoredRequest(_message.Message):
    __slots__ = ("run_id", "instance_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    instance_id: str
    def __init__(self, run_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class GetUnscoredResponse(_message.Message):
    __slots__ = ("unscored",)
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    unscored: bytes
    def __init__(self, unscored: _Optional[bytes] = ...) -> None: ...

class PutGroup(_message.Message):
    __slots__ = ("lease_id", "group")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    group: _experience_pb2.ExperienceGroup
    def __init__(self, lease_id: _Optional[str] = ..., group: _Optional[_Union[_experience_pb2.ExperienceGroup, _Mapping]] = ...) -> None: ...

class PutExperienceRequest(_message.Message):
    __slots__ = ("run_id", "groups")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    groups: _containers.RepeatedCompositeFieldContainer[PutGroup]
    def __init__(self, run_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[PutGroup, _Mapping]]] = ...) -> None: ...

class PutExperienceResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[PutOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[PutOutcome, str]]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("run_id", "holder", "checkpoint_step", "consumed_instance_ids", "settles_ledger", "first_remembered_pass")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SETTLES_LEDGER_FIELD_NUMBER: _ClassVar[int]
    FIRST_REMEMBERED_PASS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    holder: str
    checkpoint_step: int
    consumed_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    settles_ledger: bool
    first_remembered_pass: int
    def __init__(self, run_id: _Optional[str] = ..., holder: _Optional[str] = ..., checkpoint_step: _Optional[int] = ..., consumed_instance_ids: _Optional[_Iterable[str]] = ..., settles_ledger: _Optional[bool] = ..., first_remembered_pass: _Optional[int] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_epoch", "replayable_steps", "run", "settle_from_step", "ledger_digest")
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLAYABLE_STEPS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    LEDGER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_epoch: int
    replayable_steps: int
    run: Run
    settle_from_step: int
    ledger_digest: str
    def __init__(self, session_epoch: _Optional[int] = ..., replayable_steps: _Optional[int] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., settle_from_step: _Optional[int] = ..., ledger_digest: _Optional[str] = ...) -> None: ...

class TrainedStep(_message.Message):
    __slots__ = ("step", "instance_ids")
    STEP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SettleTrainedRequest(_message.Message):
    __slots__ = ("run_id", "session_epoch", "steps")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session_epoch: int
    steps: _containers.RepeatedCompositeFieldContainer[TrainedStep]
    def __init__(self, run_id: _Optional[str] = ..., session_epoch: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TrainedStep, _Mapping]]] = ...) -> None: ...

class SettleTrainedResponse(_message.Message):
    __slots__ = ("settled", "settled_steps")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_STEPS_FIELD_NUMBER: _ClassVar[int]
    settled: int
    settled_steps: int
    def __init__(self, settled: _Optional[int] = ..., settled_steps: _Optional[int] = ...) -> None: ...

class LeaseExperienceRequest(_message.Message):
    __slots__ = ("run_id", "session_epoch", "step", "wait", "max_groups_per_message")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_PER_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session_epoch: int
    step: int
    wait: _duration_pb2.Duration
    max_groups_per_message: int
    def __init__(self, run_id: _Optional[str] = ..., session_epoch: _Optional[int] = ..., step: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_groups_per_message: _Optional[int] = ...) -> None: ...

class BatchManifest(_message.Message):
    __slots__ = ("granted", "instance_ids", "ready", "needed", "end_of_data", "replayed", "run_finished")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    END_OF_DATA_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    ready: int
    needed: int
    end_of_data: bool
    replayed: bool
    run_finished: bool
    def __init__(self, granted: _Optional[bool] = ..., instance_ids: _Optional[_Iterable[str]] = ..., ready: _Optional[int] = ..., needed: _Optional[int] = ..., end_of_data: _Optional[bool] = ..., replayed: _Optional[bool] = ..., run_finished: _Optional[bool] = ...) -> None: ...

class LeaseExperienceResponse(_message.Message):
    __slots__ = ("manifest", "group", "groups")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    manifest: BatchManifest
    group: _experience_pb2.ExperienceGroup
    groups: ExperienceGroups
    def __init__(self, manifest: _Optional[_Union[BatchManifest, _Mapping]] = ..., group: _Optional[_Union[_experience_pb2.ExperienceGroup, _Mapping]] = ..., groups: _Optional[_Union[ExperienceGroups, _Mapping]] = ...) -> None: ...

class ExperienceGroups(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_experience_pb2.ExperienceGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[_experience_pb2.ExperienceGroup, _Mapping]]] = ...) -> None: ...

class DropExperienceRequest(_message.Message):
    __slots__ = ("run_id", "session_epoch", "step", "instance_ids", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session_epoch: int
    step: int
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., session_epoch: _Optional[int] = ..., step: _Optional[int] = ..., instance_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DropExperienceResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    def __init__(self, dropped: _Optional[int] = ...) -> None: ...

class MarkTrainedRequest(_message.Message):
    __slots__ = ("run_id", "session_epoch", "step", "instance_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session_epoch: int
    step: int
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., session_epoch: _Optional[int] = ..., step: _Optional[int] = ..., instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class MarkTrainedResponse(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    def __init__(self, policy_version: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("run_id", "session_epoch", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session_epoch: int
    step: int
    def __init__(self, run_id: _Optional[str] = ..., session_epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("committed", "first_remembered_pass")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_REMEMBERED_PASS_FIELD_NUMBER: _ClassVar[int]
    committed: int
    first_remembered_pass: int
    def __init__(self, committed: _Optional[int] = ..., first_remembered_pass: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("instance_id", "kind", "address", "capabilities", "state", "policy_version", "gauges", "waiting_for")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    kind: _common_pb2.ServiceKind
    address: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    state: MemberState
    policy_version: int
    gauges: _containers.ScalarMap[str, float]
    waiting_for: str
    def __init__(self, instance_id: _Optional[str] = ..., kind: _Optional[_Union[_common_pb2.ServiceKind, str]] = ..., address: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[MemberState, str]] = ..., policy_version: _Optional[int] = ..., gauges: _Optional[_Mapping[str, float]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class RegisterMemberRequest(_message.Message):
    __slots__ = ("run_id", "member")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    member: Member
    def __init__(self, run_id: _Optional[str] = ..., member: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class RegisterMemberResponse(_message.Message):
    __slots__ = ("group_epoch", "run")
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    group_epoch: int
    run: Run
    def __init__(self, group_epoch: _Optional[int] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("run_id", "member")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    member: Member
    def __init__(self, run_id: _Optional[str] = ..., member: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("group_epoch", "run_state", "policy_version")
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    group_epoch: int
    run_state: RunState
    policy_version: int
    def __init__(self, group_epoch: _Optional[int] = ..., run_state: _Optional[_Union[RunState, str]] = ..., policy_version: _Optional[int] = ...) -> None: ...

class LeaveMemberRequest(_message.Message):
    __slots__ = ("run_id", "instance_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    instance_id: str
    def __init__(self, run_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class LeaveMemberResponse(_message.Message):
    __slots__ = ("group_epoch",)
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    group_epoch: int
    def __init__(self, group_epoch: _Optional[int] = ...) -> None: ...

class WatchMembersRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class WatchMembersResponse(_message.Message):
    __slots__ = ("group_epoch", "members")
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    group_epoch: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, group_epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class StartEvaluationRequest(_message.Message):
    __slots__ = ("run_id", "evaluation_set", "policy_version", "live")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SET_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    evaluation_set: str
    policy_version: int
    live: str
    def __init__(self, run_id: _Optional[str] = ..., evaluation_set: _Optional[str] = ..., policy_version: _Optional[int] = ..., live: _Optional[str] = ...) -> None: ...

class StartEvaluationResponse(_message.Message):
    __slots__ = ("evaluation_id", "prompts")
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    evaluation_id: str
    prompts: int
    def __init__(self, evaluation_id: _Optional[str] = ..., prompts: _Optional[int] = ...) -> None: ...

class GetEvaluationRequest(_message.Message):
    __slots__ = ("run_id", "evaluation_id", "wait", "summary_only")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_ONLY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    evaluation_id: str
    wait: _duration_pb2.Duration
    summary_only: bool
    def __init__(self, run_id: _Optional[str] = ..., evaluation_id: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., summary_only: _Optional[bool] = ...) -> None: ...

class GetEvaluationResponse(_message.Message):
    __slots__ = ("complete", "prompts", "finished", "dead", "headers", "transcripts")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPTS_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    prompts: int
    finished: int
    dead: int
    headers: _containers.RepeatedCompositeFieldContainer[_experience_pb2.GroupHeader]
    transcripts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, complete: _Optional[bool] = ..., prompts: _Optional[int] = ..., finished: _Optional[int] = ..., dead: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[_experience_pb2.GroupHeader, _Mapping]]] = ..., transcripts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CollectResultsRequest(_message.Message):
    __slots__ = ("run_id", "instance_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CollectResultsResponse(_message.Message):
    __slots__ = ("instance_id", "transcript", "dead")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    transcript: bytes
    dead: DeadPrompt
    def __init__(self, instance_id: _Optional[str] = ..., transcript: _Optional[bytes] = ..., dead: _Optional[_Union[DeadPrompt, _Mapping]] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("event_id", "at", "run_state", "step", "evaluation", "weights", "checkpoint", "member", "sample", "notice")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    at: _timestamp_pb2.Timestamp
    run_state: RunStateChanged
    step: StepFinished
    evaluation: EvaluationFinished
    weights: WeightsPublished
    checkpoint: CheckpointSaved
    member: MemberChanged
    sample: GroupSample
    notice: Notice
    def __init__(self, event_id: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., run_state: _Optional[_Union[RunStateChanged, _Mapping]] = ..., step: _Optional[_Union[StepFinished, _Mapping]] = ..., evaluation: _Optional[_Union[EvaluationFinished, _Mapping]] = ..., weights: _Optional[_Union[WeightsPublished, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointSaved, _Mapping]] = ..., member: _Optional[_Union[MemberChanged, _Mapping]] = ..., sample: _Optional[_Union[GroupSample, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class RunStateChanged(_message.Message):
    __slots__ = ("state", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: RunState
    reason: str
    def __init__(self, state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class StepFinished(_message.Message):
    __slots__ = ("step", "policy_version", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    policy_version: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., policy_version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class EvaluationFinished(_message.Message):
    __slots__ = ("evaluation_set", "policy_version", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EVALUATION_SET_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    evaluation_set: str
    policy_version: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, evaluation_set: _Optional[str] = ..., policy_version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WeightsPublished(_message.Message):
    __slots__ = ("policy_version", "group_epoch", "rollouts", "bytes", "elapsed")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    group_epoch: int
    rollouts: int
    bytes: int
    elapsed: _duration_pb2.Duration
    def __init__(self, policy_version: _Optional[int] = ..., group_epoch: _Optional[int] = ..., rollouts: _Optional[int] = ..., bytes: _Optional[int] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CheckpointSaved(_message.Message):
    __slots__ = ("step", "path")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class MemberChanged(_message.Message):
    __slots__ = ("member", "gone", "reason")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    member: Member
    gone: bool
    reason: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., gone: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class GroupSample(_message.Message):
    __slots__ = ("transcript",)
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    transcript: bytes
    def __init__(self, transcript: _Optional[bytes] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("level", "text", "source")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    level: str
    text: str
    source: str
    def __init__(self, level: _Optional[str] = ..., text: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class ReportProgressRequest(_message.Message):
    __slots__ = ("run_id", "event")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    event: RunEvent
    def __init__(self, run_id: _Optional[str] = ..., event: _Optional[_Union[RunEvent, _Mapping]] = ...) -> None: ...

class ReportProgressResponse(_message.Message):
    __slots__ = ("event_id",)
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    def __init__(self, event_id: _Optional[str] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("run_id", "after_event_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after_event_id: str
    def __init__(self, run_id: _Optional[str] = ..., after_event_id: _Optional[str] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: RunEvent
    def __init__(self, event: _Optional[_Union[RunEvent, _Mapping]] = ...) -> None: ...

class DeadPrompt(_message.Message):
    __slots__ = ("instance", "attempts", "reasons", "died_at", "unscored_bytes")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    DIED_AT_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    instance: _experience_pb2.PromptInstance
    attempts: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    died_at: _timestamp_pb2.Timestamp
    unscored_bytes: int
    def __init__(self, instance: _Optional[_Union[_experience_pb2.PromptInstance, _Mapping]] = ..., attempts: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ..., died_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., unscored_bytes: _Optional[int] = ...) -> None: ...

class ListDeadRequest(_message.Message):
    __slots__ = ("run_id", "limit", "instance_ids", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    limit: int
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., limit: _Optional[int] = ..., instance_ids: _Optional[_Iterable[str]] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDeadResponse(_message.Message):
    __slots__ = ("dead", "total", "next_page_token")
    DEAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    dead: _containers.RepeatedCompositeFieldContainer[DeadPrompt]
    total: int
    next_page_token: str
    def __init__(self, dead: _Optional[_Iterable[_Union[DeadPrompt, _Mapping]]] = ..., total: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequeueDeadRequest(_message.Message):
    __slots__ = ("run_id", "instance_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RequeueDeadResponse(_message.Message):
    __slots__ = ("requeued",)
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    requeued: int
    def __init__(self, requeued: _Optional[int] = ...) -> None: ...

class GetGroupRequest(_message.Message):
    __slots__ = ("run_id", "instance_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    instance_id: str
    def __init__(self, run_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class GetGroupResponse(_message.Message):
    __slots__ = ("state", "attempt", "holder", "step", "moments", "traceparent", "answered_at")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_AT_FIELD_NUMBER: _ClassVar[int]
    state: GroupState
    attempt: int
    holder: str
    step: int
    moments: _containers.RepeatedCompositeFieldContainer[GroupMoment]
    traceparent: str
    answered_at: _timestamp_pb2.Timestamp
    def __init__(self, state: _Optional[_Union[GroupState, str]] = ..., attempt: _Optional[int] = ..., holder: _Optional[str] = ..., step: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[GroupMoment, _Mapping]]] = ..., traceparent: _Optional[str] = ..., answered_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GroupMoment(_message.Message):
    __slots__ = ("kind", "at", "who", "step", "policy_version", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: GroupMomentKind
    at: _timestamp_pb2.Timestamp
    who: str
    step: int
    policy_version: int
    reason: str
    def __init__(self, kind: _Optional[_Union[GroupMomentKind, str]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., who: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AuditRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class AuditRunResponse(_message.Message):
    __slots__ = ("page", "summary")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    page: AuditPage
    summary: AuditSummary
    def __init__(self, page: _Optional[_Union[AuditPage, _Mapping]] = ..., summary: _Optional[_Union[AuditSummary, _Mapping]] = ...) -> None: ...

class AuditPage(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceRecord]
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceRecord, _Mapping]]] = ...) -> None: ...

class InstanceRecord(_message.Message):
    __slots__ = ("instance_id", "state", "attempt", "step", "data_pass")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DATA_PASS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    state: GroupState
    attempt: int
    step: int
    data_pass: int
    def __init__(self, instance_id: _Optional[str] = ..., state: _Optional[_Union[GroupState, str]] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., data_pass: _Optional[int] = ...) -> None: ...

class AuditSummary(_message.Message):
    __slots__ = ("run", "recounted", "forgotten", "first_remembered_pass", "faults")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RECOUNTED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_REMEMBERED_PASS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    run: Run
    recounted: RunStats
    forgotten: int
    first_remembered_pass: int
    faults: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., recounted: _Optional[_Union[RunStats, _Mapping]] = ..., forgotten: _Optional[int] = ..., first_remembered_pass: _Optional[int] = ..., faults: _Optional[_Iterable[str]] = ...) -> None: ...
