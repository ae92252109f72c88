import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from quartet.v1 import reward_pb2 as _reward_pb2
from quartet.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_EVALUATE: _ClassVar[Purpose]
    PURPOSE_SERVE: _ClassVar[Purpose]

class TemperatureCurve(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEMPERATURE_CURVE_UNSPECIFIED: _ClassVar[TemperatureCurve]
    TEMPERATURE_CURVE_STEP: _ClassVar[TemperatureCurve]
    TEMPERATURE_CURVE_LINEAR: _ClassVar[TemperatureCurve]
    TEMPERATURE_CURVE_COSINE: _ClassVar[TemperatureCurve]

class ScoredText(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORED_TEXT_UNSPECIFIED: _ClassVar[ScoredText]
    SCORED_TEXT_WHOLE: _ClassVar[ScoredText]
    SCORED_TEXT_LAST_TURN: _ClassVar[ScoredText]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_EVALUATE: Purpose
PURPOSE_SERVE: Purpose
TEMPERATURE_CURVE_UNSPECIFIED: TemperatureCurve
TEMPERATURE_CURVE_STEP: TemperatureCurve
TEMPERATURE_CURVE_LINEAR: TemperatureCurve
TEMPERATURE_CURVE_COSINE: TemperatureCurve
SCORED_TEXT_UNSPECIFIED: ScoredText
SCORED_TEXT_WHOLE: ScoredText
SCORED_TEXT_LAST_TURN: ScoredText
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("n", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_token_ids", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class TemperaturePoint(_message.Message):
    __slots__ = ("policy_version", "temperature")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    temperature: float
    def __init__(self, policy_version: _Optional[int] = ..., temperature: _Optional[float] = ...) -> None: ...

class TemperatureSchedule(_message.Message):
    __slots__ = ("points", "curve")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[TemperaturePoint]
    curve: TemperatureCurve
    def __init__(self, points: _Optional[_Iterable[_Union[TemperaturePoint, _Mapping]]] = ..., curve: _Optional[_Union[TemperatureCurve, str]] = ...) -> None: ...

class EnvironmentSpec(_message.Message):
    __slots__ = ("name", "parameters", "max_turns", "max_turn_tokens", "max_answer_tokens", "answer_deadline", "scored_text", "served", "add_verifiers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    MAX_TURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    SCORED_TEXT_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    ADD_VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _struct_pb2.Struct
    max_turns: int
    max_turn_tokens: int
    max_answer_tokens: int
    answer_deadline: _duration_pb2.Duration
    scored_text: ScoredText
    served: bool
    add_verifiers: bool
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., max_turns: _Optional[int] = ..., max_turn_tokens: _Optional[int] = ..., max_answer_tokens: _Optional[int] = ..., answer_deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., scored_text: _Optional[_Union[ScoredText, str]] = ..., served: _Optional[bool] = ..., add_verifiers: _Optional[bool] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "template_fields")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    template_fields: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., template_fields: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "template_arguments")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tools: str
    template_arguments: str
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools: _Optional[str] = ..., template_arguments: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("prompt_id", "chat", "text", "token_ids", "task", "reference", "verifiers", "sampling", "metadata", "environment", "columns", "teacher")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    chat: Chat
    text: str
    token_ids: _tensor_pb2.Tensor
    task: str
    reference: _reward_pb2.Reference
    verifiers: _containers.RepeatedCompositeFieldContainer[_reward_pb2.VerifierSpec]
    sampling: SamplingParams
    metadata: _containers.ScalarMap[str, str]
    environment: EnvironmentSpec
    columns: str
    teacher: str
    def __init__(self, prompt_id: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., task: _Optional[str] = ..., reference: _Optional[_Union[_reward_pb2.Reference, _Mapping]] = ..., verifiers: _Optional[_Iterable[_Union[_reward_pb2.VerifierSpec, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., environment: _Optional[_Union[EnvironmentSpec, _Mapping]] = ..., columns: _Optional[str] = ..., teacher: _Optional[str] = ...) -> None: ...

class PromptInstance(_message.Message):
    __slots__ = ("instance_id", "prompt", "purpose", "data_pass", "evaluation_id", "pinned_version", "traceparent", "source")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    DATA_PASS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    prompt: Prompt
    purpose: Purpose
    data_pass: int
    evaluation_id: str
    pinned_version: int
    traceparent: str
    source: str
    def __init__(self, instance_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., data_pass: _Optional[int] = ..., evaluation_id: _Optional[str] = ..., pinned_version: _Optional[int] = ..., traceparent: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("policy_version", "begin", "end")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    begin: int
    end: int
    def __init__(self, policy_version: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class CompletionInfo(_message.Message):
    __slots__ = ("index", "text", "finish_reason", "version_spans", "score", "tokens", "turns", "inserted_tokens", "generated_after", "scored_after", "seat", "episode", "rows", "turn_infos", "environment")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    INSERTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_AFTER_FIELD_NUMBER: _ClassVar[int]
    SCORED_AFTER_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TURN_INFOS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    finish_reason: FinishReason
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    score: _reward_pb2.Score
    tokens: int
    turns: int
    inserted_tokens: int
    generated_after: _duration_pb2.Duration
    scored_after: _duration_pb2.Duration
    seat: str
    episode: int
    rows: _containers.RepeatedCompositeFieldContainer[RowInfo]
    turn_infos: _containers.RepeatedCompositeFieldContainer[TurnInfo]
    environment: _reward_pb2.Score
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., score: _Optional[_Union[_reward_pb2.Score, _Mapping]] = ..., tokens: _Optional[int] = ..., turns: _Optional[int] = ..., inserted_tokens: _Optional[int] = ..., generated_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., scored_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., seat: _Optional[str] = ..., episode: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowInfo, _Mapping]]] = ..., turn_infos: _Optional[_Iterable[_Union[TurnInfo, _Mapping]]] = ..., environment: _Optional[_Union[_reward_pb2.Score, _Mapping]] = ...) -> None: ...

class RowInfo(_message.Message):
    __slots__ = ("prompt_text", "text", "tokens", "begun")
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    prompt_text: str
    text: str
    tokens: int
    begun: str
    def __init__(self, prompt_text: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[int] = ..., begun: _Optional[str] = ...) -> None: ...

class TurnInfo(_message.Message):
    __slots__ = ("row", "end", "reward")
    ROW_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    row: int
    end: int
    reward: float
    def __init__(self, row: _Optional[int] = ..., end: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...

class GroupTranscript(_message.Message):
    __slots__ = ("instance", "prompt_text", "completions", "rollout_id", "finished_at", "started_at")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    instance: PromptInstance
    prompt_text: str
    completions: _containers.RepeatedCompositeFieldContainer[CompletionInfo]
    rollout_id: str
    finished_at: _timestamp_pb2.Timestamp
    started_at: _timestamp_pb2.Timestamp
    def __init__(self, instance: _Optional[_Union[PromptInstance, _Mapping]] = ..., prompt_text: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[CompletionInfo, _Mapping]]] = ..., rollout_id: _Optional[str] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GroupTensors(_message.Message):
    __slots__ = ("prompt_token_ids", "completion_token_ids", "rollout_log_probs", "loss_mask", "rewards", "temperatures", "truncated", "version_spans", "format_acc", "ans_acc", "sampling_mask_counts", "sampling_mask_token_ids", "ans_judged", "sampling", "prompt_routed_experts", "completion_routed_experts", "verifiers", "verifier_rewards", "prompts", "row_prompts", "row_completions", "seats", "turn_ends", "turn_indices", "turn_rewards", "outcome_rewards", "teacher_log_probs")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_ACC_FIELD_NUMBER: _ClassVar[int]
    ANS_ACC_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ANS_JUDGED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_REWARDS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ROW_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ROW_COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    TURN_ENDS_FIELD_NUMBER: _ClassVar[int]
    TURN_INDICES_FIELD_NUMBER: _ClassVar[int]
    TURN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_REWARDS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _tensor_pb2.Tensor
    completion_token_ids: _tensor_pb2.RaggedTensor
    rollout_log_probs: _tensor_pb2.RaggedTensor
    loss_mask: _tensor_pb2.RaggedTensor
    rewards: _tensor_pb2.Tensor
    temperatures: _tensor_pb2.Tensor
    truncated: _tensor_pb2.Tensor
    version_spans: _tensor_pb2.RaggedTensor
    format_acc: _tensor_pb2.Tensor
    ans_acc: _tensor_pb2.Tensor
    sampling_mask_counts: _tensor_pb2.RaggedTensor
    sampling_mask_token_ids: _tensor_pb2.RaggedTensor
    ans_judged: _tensor_pb2.Tensor
    sampling: SamplingParams
    prompt_routed_experts: _tensor_pb2.Tensor
    completion_routed_experts: _tensor_pb2.RaggedTensor
    verifiers: _containers.RepeatedScalarFieldContainer[str]
    verifier_rewards: _tensor_pb2.Tensor
    prompts: _tensor_pb2.RaggedTensor
    row_prompts: _tensor_pb2.Tensor
    row_completions: _tensor_pb2.Tensor
    seats: _tensor_pb2.Tensor
    turn_ends: _tensor_pb2.RaggedTensor
    turn_indices: _tensor_pb2.RaggedTensor
    turn_rewards: _tensor_pb2.RaggedTensor
    outcome_rewards: _tensor_pb2.Tensor
    teacher_log_probs: _tensor_pb2.RaggedTensor
    def __init__(self, prompt_token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., completion_token_ids: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., rollout_log_probs: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., loss_mask: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., rewards: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., temperatures: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., truncated: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., version_spans: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., format_acc: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ans_acc: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sampling_mask_counts: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., sampling_mask_token_ids: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., ans_judged: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., prompt_routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., completion_routed_experts: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., verifiers: _Optional[_Iterable[str]] = ..., verifier_rewards: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., prompts: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., row_prompts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., row_completions: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., seats: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., turn_ends: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., turn_indices: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., turn_rewards: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ..., outcome_rewards: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., teacher_log_probs: _Optional[_Union[_tensor_pb2.RaggedTensor, _Mapping]] = ...) -> None: ...

class GroupHeader(_message.Message):
    __slots__ = ("instance_id", "purpose", "min_policy_version", "max_policy_version", "completions", "completion_tokens", "reward_mean", "reward_std", "attempt", "ans_acc", "traceparent", "unjudged", "verifiers", "source")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_STD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ANS_ACC_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    UNJUDGED_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    purpose: Purpose
    min_policy_version: int
    max_policy_version: int
    completions: int
    completion_tokens: int
    reward_mean: float
    reward_std: float
    attempt: int
    ans_acc: float
    traceparent: str
    unjudged: int
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierMean]
    source: str
    def __init__(self, instance_id: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., min_policy_version: _Optional[int] = ..., max_policy_version: _Optional[int] = ..., completions: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ..., reward_std: _Optional[float] = ..., attempt: _Optional[int] = ..., ans_acc: _Optional[float] = ..., traceparent: _Optional[str] = ..., unjudged: _Optional[int] = ..., verifiers: _Optional[_Iterable[_Union[VerifierMean, _Mapping]]] = ..., source: _Optional[str] = ...) -> None: ...

class VerifierMean(_message.Message):
    __slots__ = ("name", "reward", "completions", "ans_acc", "judged")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ANS_ACC_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    name: str
    reward: float
    completions: int
    ans_acc: float
    judged: int
    def __init__(self, name: _Optional[str] = ..., reward: _Optional[float] = ..., completions: _Optional[int] = ..., ans_acc: _Optional[float] = ..., judged: _Optional[int] = ...) -> None: ...

class ExperienceGroup(_message.Message):
    __slots__ = ("header", "tensors", "transcript")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    header: GroupHeader
    tensors: bytes
    transcript: bytes
    def __init__(self, header: _Optional[_Union[GroupHeader, _Mapping]] = ..., tensors: _Optional[bytes] = ..., transcript: _Optional[bytes] = ...) -> None: ...

class UnscoredGroup(_message.Message):
    __slots__ = ("group", "items")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    group: ExperienceGroup
    items: _containers.RepeatedCompositeFieldContainer[_reward_pb2.ScoreItem]
    def __init__(self, group: _Optional[_Union[ExperienceGroup, _Mapping]] = ..., items: _Optional[_Iterable[_Union[_reward_pb2.ScoreItem, _Mapping]]] = ...) -> None: ...
