from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScalarType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALAR_TYPE_UNSPECIFIED: _ClassVar[ScalarType]
    SCALAR_TYPE_F32: _ClassVar[ScalarType]
    SCALAR_TYPE_F16: _ClassVar[ScalarType]
    SCALAR_TYPE_BF16: _ClassVar[ScalarType]
    SCALAR_TYPE_F8_E4M3: _ClassVar[ScalarType]
    SCALAR_TYPE_I64: _ClassVar[ScalarType]
    SCALAR_TYPE_I32: _ClassVar[ScalarType]
    SCALAR_TYPE_I16: _ClassVar[ScalarType]
    SCALAR_TYPE_I8: _ClassVar[ScalarType]
    SCALAR_TYPE_U8: _ClassVar[ScalarType]
    SCALAR_TYPE_F8_E5M2: _ClassVar[ScalarType]
SCALAR_TYPE_UNSPECIFIED: ScalarType
SCALAR_TYPE_F32: ScalarType
SCALAR_TYPE_F16: ScalarType
SCALAR_TYPE_BF16: ScalarType
SCALAR_TYPE_F8_E4M3: ScalarType
SCALAR_TYPE_I64: ScalarType
SCALAR_TYPE_I32: ScalarType
SCALAR_TYPE_I16: ScalarType
SCALAR_TYPE_I8: ScalarType
SCALAR_TYPE_U8: ScalarType
SCALAR_TYPE_F8_E5M2: ScalarType

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: ScalarType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[ScalarType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...
