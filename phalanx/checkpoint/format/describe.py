"""What a rank holds, read off its tensors: the table of its group and its place in the meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.format.geometry import (
    MeshPosition,
    TensorEntry,
    TensorTable,
    digest_of,
    encode_table,
    to_runs,
)
from phalanx.checkpoint.format.layout import WHOLE, Layout, cutting_order

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Description:
    """A rank's tensors as a checkpoint sees them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._seen: dict[Any, int] = {}
        self._layouts: list[Layout] = []
        self._bases: list[int] = []
        self._coordinates: list[tuple[int, ...]] = []
        # Sorted: ranks that hold the same tensors have the same table, whatever order they use.
        entries = tuple(self._entry(name, tensors[name]) for name in sorted(tensors))
        self.table = TensorTable(entries, tuple(self._layouts))
        self.encoded = encode_table(self.table)
        self.digest = digest_of(self.encoded)
        self.stand = MeshPosition(tuple(self._bases), tuple(self._coordinates))

    def _entry(self, name: str, tensor: Tensor) -> TensorEntry:
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name} has the type {tensor.dtype}, which shards cannot hold")
        layout = self._layout(tensor)
        entry = TensorEntry(name, NAMES[tensor.dtype], tuple(tensor.shape), layout)
        block = self._layouts[layout].block(entry.shape, self._coordinates[layout])
        if block.sizes != tuple(local_part(tensor).shape):
            held = tuple(local_part(tensor).shape)
            raise ValueError(f"{name}: the placements make {block.sizes} of it, held is {held}")
        return entry

    def _layout(self, tensor: Tensor) -> int:
        if isinstance(tensor, DTensor):
            key: Any = (id(tensor.device_mesh), tensor.placements)
        else:
            key = None
        if key not in self._seen:
            layout, base, coordinate = place(tensor)
            self._seen[key] = len(self._layouts)
            self._layouts.append(layout)
            self._bases.append(base)
            self._coordinates.append(coordinate)
        return self._seen[key]


def place(tensor: Tensor) -> tuple[Layout, int, tuple[int, ...]]:
    """How a tensor is cut, the first rank of its mesh, and this rank's coordinate there."""
    if not isinstance(tensor, DTensor):
        return Layout((), (), (), to_runs([0])), current_rank(), ()
    mesh: DeviceMesh = tensor.device_mesh
    sizes = tuple(mesh.mesh.shape)
    cuts, after = [], []
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(f"a sum that is not finished cannot be saved: {tensor.placements}")
        cuts.append(WHOLE if placement.is_replicate() else int(placement.dim))  # type: ignore[attr-defined]
        after.append(int(getattr(placement, "split_factor", 1)))
    order = cutting_order(sizes, tuple(cuts), tuple(after))
    ranks = mesh.mesh.flatten().tolist()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("a tensor lies on a mesh that this rank is not part of")
    runs = to_runs([rank - ranks[0] for rank in ranks])
    return Layout(sizes, tuple(cuts), tuple(order), runs), ranks[0], tuple(coordinate)


def local_part(tensor: Tensor) -> Tensor:
    """The block of a tensor that is on this rank."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def current_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
