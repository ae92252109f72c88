import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_CORRECT: _ClassVar[Outcome]
    OUTCOME_INCORRECT: _ClassVar[Outcome]
    OUTCOME_MALFORMED: _ClassVar[Outcome]
    OUTCOME_TIMED_OUT: _ClassVar[Outcome]
    OUTCOME_RESOURCE_EXCEEDED: _ClassVar[Outcome]
    OUTCOME_COMPILE_ERROR: _ClassVar[Outcome]
    OUTCOME_RUNTIME_ERROR: _ClassVar[Outcome]
    OUTCOME_UNJUDGED: _ClassVar[Outcome]
    OUTCOME_UNEVALUATED: _ClassVar[Outcome]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_VERIFIER_CRASHED: _ClassVar[FailureKind]
    FAILURE_KIND_SANDBOX_UNAVAILABLE: _ClassVar[FailureKind]
    FAILURE_KIND_BAD_REFERENCE: _ClassVar[FailureKind]
    FAILURE_KIND_INVALID_ITEM: _ClassVar[FailureKind]
    FAILURE_KIND_SHUT_DOWN: _ClassVar[FailureKind]

class ExecutionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTION_OUTCOME_UNSPECIFIED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_EXITED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_SIGNALLED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_TIMED_OUT: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_MEMORY_EXCEEDED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_OUTPUT_EXCEEDED: _ClassVar[ExecutionOutcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_CORRECT: Outcome
OUTCOME_INCORRECT: Outcome
OUTCOME_MALFORMED: Outcome
OUTCOME_TIMED_OUT: Outcome
OUTCOME_RESOURCE_EXCEEDED: Outcome
OUTCOME_COMPILE_ERROR: Outcome
OUTCOME_RUNTIME_ERROR: Outcome
OUTCOME_UNJUDGED: Outcome
OUTCOME_UNEVALUATED: Outcome
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_VERIFIER_CRASHED: FailureKind
FAILURE_KIND_SANDBOX_UNAVAILABLE: FailureKind
FAILURE_KIND_BAD_REFERENCE: FailureKind
FAILURE_KIND_INVALID_ITEM: FailureKind
FAILURE_KIND_SHUT_DOWN: FailureKind
EXECUTION_OUTCOME_UNSPECIFIED: ExecutionOutcome
EXECUTION_OUTCOME_EXITED: ExecutionOutcome
EXECUTION_OUTCOME_SIGNALLED: ExecutionOutcome
EXECUTION_OUTCOME_TIMED_OUT: ExecutionOutcome
EXECUTION_OUTCOME_MEMORY_EXCEEDED: ExecutionOutcome
EXECUTION_OUTCOME_OUTPUT_EXCEEDED: ExecutionOutcome

class Reference(_message.Message):
    __slots__ = ("answer", "test_cases", "test_program", "entry_point")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TEST_CASES_FIELD_NUMBER: _ClassVar[int]
    TEST_PROGRAM_FIELD_NUMBER: _ClassVar[int]
    ENTRY_POINT_FIELD_NUMBER: _ClassVar[int]
    answer: str
    test_cases: _containers.RepeatedCompositeFieldContainer[TestCase]
    test_program: str
    entry_point: str
    def __init__(self, answer: _Optional[str] = ..., test_cases: _Optional[_Iterable[_Union[TestCase, _Mapping]]] = ..., test_program: _Optional[str] = ..., entry_point: _Optional[str] = ...) -> None: ...

class TestCase(_message.Message):
    __slots__ = ("input", "output")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    input: str
    output: str
    def __init__(self, input: _Optional[str] = ..., output: _Optional[str] = ...) -> None: ...

class VerifierSpec(_message.Message):
    __slots__ = ("name", "weight", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    parameters: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("item_id", "completion", "reference", "verifiers", "completion_tokens", "max_new_tokens", "truncated", "run_id", "prompt", "traceparent", "columns", "messages")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    completion: str
    reference: Reference
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierSpec]
    completion_tokens: int
    max_new_tokens: int
    truncated: bool
    run_id: str
    prompt: str
    traceparent: str
    columns: str
    messages: str
    def __init__(self, item_id: _Optional[str] = ..., completion: _Optional[str] = ..., reference: _Optional[_Union[Reference, _Mapping]] = ..., verifiers: _Optional[_Iterable[_Union[VerifierSpec, _Mapping]]] = ..., completion_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., truncated: _Optional[bool] = ..., run_id: _Optional[str] = ..., prompt: _Optional[str] = ..., traceparent: _Optional[str] = ..., columns: _Optional[str] = ..., messages: _Optional[str] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("reward", "format_acc", "ans_acc", "outcome", "parsed_answer", "reason", "verifiers", "elapsed", "unjudged")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FORMAT_ACC_FIELD_NUMBER: _ClassVar[int]
    ANS_ACC_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PARSED_ANSWER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    UNJUDGED_FIELD_NUMBER: _ClassVar[int]
    reward: float
    format_acc: float
    ans_acc: float
    outcome: Outcome
    parsed_answer: str
    reason: str
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierScore]
    elapsed: _duration_pb2.Duration
    unjudged: bool
    def __init__(self, reward: _Optional[float] = ..., format_acc: _Optional[float] = ..., ans_acc: _Optional[float] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., parsed_answer: _Optional[str] = ..., reason: _Optional[str] = ..., verifiers: _Optional[_Iterable[_Union[VerifierScore, _Mapping]]] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., unjudged: _Optional[bool] = ...) -> None: ...

class VerifierScore(_message.Message):
    __slots__ = ("name", "reward", "outcome", "reason", "tests_passed", "tests", "weight", "ans_acc", "reads", "reference_is_text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TESTS_PASSED_FIELD_NUMBER: _ClassVar[int]
    TESTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ANS_ACC_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_IS_TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    reward: float
    outcome: Outcome
    reason: str
    tests_passed: int
    tests: int
    weight: float
    ans_acc: float
    reads: _containers.RepeatedScalarFieldContainer[str]
    reference_is_text: bool
    def __init__(self, name: _Optional[str] = ..., reward: _Optional[float] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., tests_passed: _Optional[int] = ..., tests: _Optional[int] = ..., weight: _Optional[float] = ..., ans_acc: _Optional[float] = ..., reads: _Optional[_Iterable[str]] = ..., reference_is_text: _Optional[bool] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message", "retryable", "place", "traceback")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    kind: FailureKind
    message: str
    retryable: bool
    place: str
    traceback: str
    def __init__(self, kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., place: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("item_id", "score", "failure")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    score: Score
    failure: Failure
    def __init__(self, item_id: _Optional[str] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ScoreResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ScoreResult, _Mapping]]] = ...) -> None: ...

class ScoreStreamRequest(_message.Message):
    __slots__ = ("item", "items")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    item: ScoreItem
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, item: _Optional[_Union[ScoreItem, _Mapping]] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreStreamResponse(_message.Message):
    __slots__ = ("result", "results")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    result: ScoreResult
    results: _containers.RepeatedCompositeFieldContainer[ScoreResult]
    def __init__(self, result: _Optional[_Union[ScoreResult, _Mapping]] = ..., results: _Optional[_Iterable[_Union[ScoreResult, _Mapping]]] = ...) -> None: ...

class ListVerifiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListVerifiersResponse(_message.Message):
    __slots__ = ("verifiers",)
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierInfo]
    def __init__(self, verifiers: _Optional[_Iterable[_Union[VerifierInfo, _Mapping]]] = ...) -> None: ...

class VerifierInfo(_message.Message):
    __slots__ = ("name", "description", "parameters_schema")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_schema: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_schema: _Optional[str] = ...) -> None: ...

class ExecutionLimits(_message.Message):
    __slots__ = ("wall_time", "cpu_time", "memory_bytes", "output_bytes")
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    wall_time: _duration_pb2.Duration
    cpu_time: _duration_pb2.Duration
    memory_bytes: int
    output_bytes: int
    def __init__(self, wall_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cpu_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("language", "source", "stdin", "limits", "run_id")
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    language: str
    source: str
    stdin: str
    limits: ExecutionLimits
    run_id: str
    def __init__(self, language: _Optional[str] = ..., source: _Optional[str] = ..., stdin: _Optional[str] = ..., limits: _Optional[_Union[ExecutionLimits, _Mapping]] = ..., run_id: _Optional[str] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("outcome", "exit_code", "signal", "stdout", "stderr", "elapsed")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    outcome: ExecutionOutcome
    exit_code: int
    signal: int
    stdout: str
    stderr: str
    elapsed: _duration_pb2.Duration
    def __init__(self, outcome: _Optional[_Union[ExecutionOutcome, str]] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., stdout: _Optional[str] = ..., stderr: _Optional[str] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
