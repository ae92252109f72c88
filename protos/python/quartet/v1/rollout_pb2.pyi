import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from quartet.v1 import experience_pb2 as _experience_pb2
from quartet.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightTransport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_TRANSPORT_UNSPECIFIED: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_GLOO: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_NCCL: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_FILE: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_CUSTOM: _ClassVar[WeightTransport]

class WeightKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_KIND_UNSPECIFIED: _ClassVar[WeightKind]
    WEIGHT_KIND_FULL: _ClassVar[WeightKind]
    WEIGHT_KIND_LORA: _ClassVar[WeightKind]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
WEIGHT_TRANSPORT_UNSPECIFIED: WeightTransport
WEIGHT_TRANSPORT_GLOO: WeightTransport
WEIGHT_TRANSPORT_NCCL: WeightTransport
WEIGHT_TRANSPORT_FILE: WeightTransport
WEIGHT_TRANSPORT_CUSTOM: WeightTransport
WEIGHT_KIND_UNSPECIFIED: WeightKind
WEIGHT_KIND_FULL: WeightKind
WEIGHT_KIND_LORA: WeightKind
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_KEEP: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_ABORT: PauseMode

class RolloutServiceGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutServiceGetStatusResponse(_message.Message):
    __slots__ = ("run_id", "engine", "policy_version", "group_epoch", "running", "waiting", "kv_cache_use", "tokens_per_second", "paused", "waiting_for", "tokens_total", "groups_total", "max_model_len", "sleep_level", "instance_id", "newest_group_epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NEWEST_GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    engine: str
    policy_version: int
    group_epoch: int
    running: int
    waiting: int
    kv_cache_use: float
    tokens_per_second: float
    paused: bool
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    tokens_total: int
    groups_total: int
    max_model_len: int
    sleep_level: int
    instance_id: str
    newest_group_epoch: int
    def __init__(self, run_id: _Optional[str] = ..., engine: _Optional[str] = ..., policy_version: _Optional[int] = ..., group_epoch: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_cache_use: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., paused: _Optional[bool] = ..., waiting_for: _Optional[_Iterable[str]] = ..., tokens_total: _Optional[int] = ..., groups_total: _Optional[int] = ..., max_model_len: _Optional[int] = ..., sleep_level: _Optional[int] = ..., instance_id: _Optional[str] = ..., newest_group_epoch: _Optional[int] = ...) -> None: ...

class SetSleepRequest(_message.Message):
    __slots__ = ("level", "timeout")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    level: int
    timeout: _duration_pb2.Duration
    def __init__(self, level: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SetSleepResponse(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    def __init__(self, policy_version: _Optional[int] = ...) -> None: ...

class SetDrainRequest(_message.Message):
    __slots__ = ("draining", "grace")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    grace: _duration_pb2.Duration
    def __init__(self, draining: _Optional[bool] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SetDrainResponse(_message.Message):
    __slots__ = ("run_id", "finished", "given_back")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    finished: int
    given_back: int
    def __init__(self, run_id: _Optional[str] = ..., finished: _Optional[int] = ..., given_back: _Optional[int] = ...) -> None: ...

class JoinWeightGroupRequest(_message.Message):
    __slots__ = ("run_id", "group_epoch", "transport", "store_host", "store_port", "rank", "world_size", "timeout", "libraries", "secret", "transport_name", "invitation", "store_gated")
    class LibrariesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class InvitationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_NAME_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    STORE_GATED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_epoch: int
    transport: WeightTransport
    store_host: str
    store_port: int
    rank: int
    world_size: int
    timeout: _duration_pb2.Duration
    libraries: _containers.ScalarMap[str, str]
    secret: bytes
    transport_name: str
    invitation: _containers.ScalarMap[str, str]
    store_gated: bool
    def __init__(self, run_id: _Optional[str] = ..., group_epoch: _Optional[int] = ..., transport: _Optional[_Union[WeightTransport, str]] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., libraries: _Optional[_Mapping[str, str]] = ..., secret: _Optional[bytes] = ..., transport_name: _Optional[str] = ..., invitation: _Optional[_Mapping[str, str]] = ..., store_gated: _Optional[bool] = ...) -> None: ...

class JoinWeightGroupResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    def __init__(self, ranks: _Optional[int] = ...) -> None: ...

class WeightTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "bucket", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _tensor_pb2.Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    bucket: int
    offset: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class LoraConfig(_message.Message):
    __slots__ = ("r", "alpha", "target_modules", "base_checksum")
    R_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    BASE_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    r: int
    alpha: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    base_checksum: int
    def __init__(self, r: _Optional[int] = ..., alpha: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ..., base_checksum: _Optional[int] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("kind", "tensors", "bucket_bytes", "lora", "checksum_algorithm")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    kind: WeightKind
    tensors: _containers.RepeatedCompositeFieldContainer[WeightTensor]
    bucket_bytes: _containers.RepeatedScalarFieldContainer[int]
    lora: LoraConfig
    checksum_algorithm: str
    def __init__(self, kind: _Optional[_Union[WeightKind, str]] = ..., tensors: _Optional[_Iterable[_Union[WeightTensor, _Mapping]]] = ..., bucket_bytes: _Optional[_Iterable[int]] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., checksum_algorithm: _Optional[str] = ...) -> None: ...

class BeginWeightUpdateRequest(_message.Message):
    __slots__ = ("run_id", "group_epoch", "policy_version", "manifest", "pause_mode", "keep_kv_cache", "path", "timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    KEEP_KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_epoch: int
    policy_version: int
    manifest: WeightManifest
    pause_mode: PauseMode
    keep_kv_cache: bool
    path: str
    timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., group_epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., keep_kv_cache: _Optional[bool] = ..., path: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class BeginWeightUpdateResponse(_message.Message):
    __slots__ = ("paused_completions",)
    PAUSED_COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    paused_completions: int
    def __init__(self, paused_completions: _Optional[int] = ...) -> None: ...

class FinishWeightUpdateRequest(_message.Message):
    __slots__ = ("run_id", "group_epoch", "policy_version", "checksum", "bucket_checksums")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BUCKET_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_epoch: int
    policy_version: int
    checksum: int
    bucket_checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., group_epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., checksum: _Optional[int] = ..., bucket_checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class FinishWeightUpdateResponse(_message.Message):
    __slots__ = ("policy_version", "paused")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    paused: _duration_pb2.Duration
    def __init__(self, policy_version: _Optional[int] = ..., paused: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AbortWeightUpdateRequest(_message.Message):
    __slots__ = ("run_id", "group_epoch", "policy_version", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_epoch: int
    policy_version: int
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., group_epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortWeightUpdateResponse(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    def __init__(self, policy_version: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "run_id", "sampling_masks")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASKS_FIELD_NUMBER: _ClassVar[int]
    prompt: _experience_pb2.Prompt
    run_id: str
    sampling_masks: bool
    def __init__(self, prompt: _Optional[_Union[_experience_pb2.Prompt, _Mapping]] = ..., run_id: _Optional[str] = ..., sampling_masks: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("completions",)
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    completions: _containers.RepeatedCompositeFieldContainer[GeneratedCompletion]
    def __init__(self, completions: _Optional[_Iterable[_Union[GeneratedCompletion, _Mapping]]] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("prompt", "run_id", "sampling_masks")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASKS_FIELD_NUMBER: _ClassVar[int]
    prompt: _experience_pb2.Prompt
    run_id: str
    sampling_masks: bool
    def __init__(self, prompt: _Optional[_Union[_experience_pb2.Prompt, _Mapping]] = ..., run_id: _Optional[str] = ..., sampling_masks: _Optional[bool] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("completion",)
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    completion: GeneratedCompletion
    def __init__(self, completion: _Optional[_Union[GeneratedCompletion, _Mapping]] = ...) -> None: ...

class GeneratedCompletion(_message.Message):
    __slots__ = ("info", "token_ids", "log_probs", "sampling_mask_counts", "sampling_mask_token_ids")
    INFO_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    info: _experience_pb2.CompletionInfo
    token_ids: _tensor_pb2.Tensor
    log_probs: _tensor_pb2.Tensor
    sampling_mask_counts: _tensor_pb2.Tensor
    sampling_mask_token_ids: _tensor_pb2.Tensor
    def __init__(self, info: _Optional[_Union[_experience_pb2.CompletionInfo, _Mapping]] = ..., token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., log_probs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sampling_mask_counts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sampling_mask_token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class LogProbsRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "completion_token_ids", "vocabulary")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _tensor_pb2.Tensor
    completion_token_ids: _tensor_pb2.Tensor
    vocabulary: str
    def __init__(self, prompt_token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., completion_token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., vocabulary: _Optional[str] = ...) -> None: ...

class LogProbsResponse(_message.Message):
    __slots__ = ("log_probs", "policy_version")
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    log_probs: _tensor_pb2.Tensor
    policy_version: int
    def __init__(self, log_probs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., policy_version: _Optional[int] = ...) -> None: ...
