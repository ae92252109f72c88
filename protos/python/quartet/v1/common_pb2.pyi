import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_KIND_UNSPECIFIED: _ClassVar[ServiceKind]
    SERVICE_KIND_BROKER: _ClassVar[ServiceKind]
    SERVICE_KIND_ROLLOUT: _ClassVar[ServiceKind]
    SERVICE_KIND_REWARD: _ClassVar[ServiceKind]
    SERVICE_KIND_TRAINER: _ClassVar[ServiceKind]
    SERVICE_KIND_CLIENT: _ClassVar[ServiceKind]
    SERVICE_KIND_ENVIRONMENT: _ClassVar[ServiceKind]
SERVICE_KIND_UNSPECIFIED: ServiceKind
SERVICE_KIND_BROKER: ServiceKind
SERVICE_KIND_ROLLOUT: ServiceKind
SERVICE_KIND_REWARD: ServiceKind
SERVICE_KIND_TRAINER: ServiceKind
SERVICE_KIND_CLIENT: ServiceKind
SERVICE_KIND_ENVIRONMENT: ServiceKind

class ContractVersion(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("caller", "build", "contract", "required_capabilities", "libraries")
    class LibrariesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    caller: ServiceKind
    build: str
    contract: ContractVersion
    required_capabilities: _containers.RepeatedScalarFieldContainer[str]
    libraries: _containers.ScalarMap[str, str]
    def __init__(self, caller: _Optional[_Union[ServiceKind, str]] = ..., build: _Optional[str] = ..., contract: _Optional[_Union[ContractVersion, _Mapping]] = ..., required_capabilities: _Optional[_Iterable[str]] = ..., libraries: _Optional[_Mapping[str, str]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("service", "instance_id", "build", "contract", "capabilities", "libraries", "started_at", "waiting_for", "idle_fraction")
    class LibrariesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    IDLE_FRACTION_FIELD_NUMBER: _ClassVar[int]
    service: ServiceKind
    instance_id: str
    build: str
    contract: ContractVersion
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    libraries: _containers.ScalarMap[str, str]
    started_at: _timestamp_pb2.Timestamp
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    idle_fraction: float
    def __init__(self, service: _Optional[_Union[ServiceKind, str]] = ..., instance_id: _Optional[str] = ..., build: _Optional[str] = ..., contract: _Optional[_Union[ContractVersion, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ..., libraries: _Optional[_Mapping[str, str]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., idle_fraction: _Optional[float] = ...) -> None: ...
