"""The ``.metadata`` of a DCP folder, read without running what it says.

It is a pickle, and unpickling calls whatever the file names. Here each name that torch writes
into such a file stands for a record that keeps its arguments and does nothing, every other name
is an error, and the structs of torch are built from the records after each of their fields was
checked. The folder of a stranger can be wrong; it cannot act.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

MOST_BYTES = 1 << 30  # of the file; one of a million chunks has a fifth of it
EXPANSION = 1000  # how much a compressed chunk may grow

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"  # Megatron keeps the plans of its ranks
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "BytesIOWriteData"),
    (_OLD_PROPERTIES, "TensorProperties"),
    (_OLD_PROPERTIES, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
    ("builtins", "getattr"),  # how Python 3.11 once wrote a member of an enum
}


class UnsafeMetadataError(ValueError):
    """A ``.metadata`` that names what torch's has not, or that contradicts itself."""


class _Record:
    """What a file says of an object: its arguments and its state."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, {}
        return self

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UnsafeMetadataError(f"{type(self).__name__} is filled like a dict")


# In Python, since the one in C makes a table as large as the largest number a file names.
class _Unpickler(pickle._Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # Made for this file alone: a state that is set on a class reaches nothing else.
        self._classes = {name: type(name[1], (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (made := self._classes.get((module, name))) is None:
            raise UnsafeMetadataError(
                f"names {module}.{name}, which is no part of a checkpoint's metadata: "
                "nothing of it was run"
            )
        return made


def read_metadata(path: Path) -> Metadata:
    """The tensors of a DCP folder and where their bytes lie; UnsafeMetadataError with the rule."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UnsafeMetadataError(f"has {size:,} bytes; at most {MOST_BYTES:,} are read")
    root = _Unpickler(path.read_bytes()).load()
    fields = _fields(root, "Metadata")
    infos = {
        _index(key): _storage_info(value)
        for key, value in _items(fields.get("storage_data"), "storage_data")
    }
    tensors: dict[str, Any] = {}
    for name, value in _items(fields.get("state_dict_metadata"), "state_dict_metadata"):
        if not isinstance(name, str):
            raise UnsafeMetadataError("names a tensor by something that is no text")
        if type(value).__name__ == "BytesStorageMetadata":
            tensors[name] = BytesStorageMetadata()
        else:
            tensors[name] = _tensor(name, value)
    _check_bytes(tensors, infos, path.parent)
    version = fields.get("version")
    return Metadata(
        state_dict_metadata=tensors,
        storage_data=infos,
        version=version if isinstance(version, str) else None,
    )


def _fields(record: Any, class_name: str) -> Mapping[str, Any]:
    """The fields that a record of this kind was given."""
    if not isinstance(record, _Record) or type(record).__name__ != class_name:
        raise UnsafeMetadataError(f"has a {type(record).__name__} where a {class_name} belongs")
    if not isinstance(record.state, dict):
        raise UnsafeMetadataError(f"has a {class_name} without fields")
    return record.state


def _items(value: Any, name: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise UnsafeMetadataError(f"has no {name}")
    return value.items()


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= sys.maxsize:
        raise UnsafeMetadataError(f"has a {what} that is no size")
    return value


def _shape(value: Any, what: str) -> torch.Size:
    if isinstance(value, _Record) and type(value).__name__ == "Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > 64:
        raise UnsafeMetadataError(f"has {what} that are no sizes")
    return torch.Size([_natural(number, what) for number in value])


def _tensor(name: str, value: Any) -> TensorStorageMetadata:
    fields = _fields(value, "TensorStorageMetadata")
    properties = fields.get("properties")
    if not isinstance(properties, _Record) or type(properties).__name__ != "TensorProperties":
        raise UnsafeMetadataError(f"says nothing of the kind of {name}")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise UnsafeMetadataError(f"gives {name} no dtype")
    size, chunks = _shape(fields.get("size"), f"sizes of {name}"), []
    parts = fields.get("chunks")
    for part in parts if isinstance(parts, list) else ():
        held = _fields(part, "ChunkStorageMetadata")
        offsets = _shape(held.get("offsets"), f"offsets of {name}")
        sizes = _shape(held.get("sizes"), f"sizes of a part of {name}")
        inside = len(offsets) == len(sizes) == len(size) and all(
            start + length <= whole
            for start, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise UnsafeMetadataError(f"has a part of {name} that lies outside it")
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise UnsafeMetadataError(f"has parts of {name} that do not make up the whole of it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    name, offset, index = fields.get("fqn"), fields.get("offset"), fields.get("index")
    if not isinstance(name, str):
        raise UnsafeMetadataError("has bytes of a tensor without a name")
    where = None if offset is None else _shape(offset, f"offsets of {name}")
    return MetadataIndex(name, where, None if index is None else _natural(index, "index"))


def _storage_info(value: Any) -> _StorageInfo:
    fields = _fields(value, "_StorageInfo")
    relative = fields.get("relative_path")
    if not isinstance(relative, str) or "\0" in relative:
        raise UnsafeMetadataError("names no file for the bytes of a tensor")
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts:
        raise UnsafeMetadataError(f"names the file {relative}, which is outside of the folder")
    offset = _natural(fields.get("offset"), "place in a file")
    length = _natural(fields.get("length"), "length in a file")
    if transforms := fields.get("transform_descriptors"):
        if not isinstance(transforms, list | tuple) or not all(
            isinstance(name, str) for name in transforms
        ):
            raise UnsafeMetadataError(f"names no known coding of {relative}")
        return _StorageInfo(relative, offset, length, tuple(transforms))
    return _StorageInfo(relative, offset, length)


def _check_bytes(
    tensors: Mapping[str, Any], infos: Mapping[MetadataIndex, _StorageInfo], folder: Path
) -> None:
    """No tensor is larger than the files it may lie in: memory is asked for before they are read.

    A file that is missing or too short is found when it is read.
    """
    sizes: dict[str, int] = {}
    files: dict[str, set[str]] = {}
    coded = any(getattr(info, "transform_descriptors", None) for info in infos.values())
    for index, info in infos.items():
        path = info.relative_path
        if path not in sizes:
            with suppress(OSError):
                sizes[path] = (folder / path).stat().st_size
        files.setdefault(index.fqn, set()).add(path)
    largest = sum(sizes.values()) * (EXPANSION if coded else 1)
    for name, item in tensors.items():
        if not isinstance(item, TensorStorageMetadata):
            continue
        wanted = math.prod(item.size) * item.properties.dtype.itemsize
        if wanted > largest and all(path in sizes for path in files.get(name, ())):
            raise UnsafeMetadataError(
                f"says that {name} has {wanted:,} bytes; all files of the folder have {largest:,}"
            )
