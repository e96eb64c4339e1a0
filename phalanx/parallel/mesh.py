"""The device mesh: which ranks form which group along each axis.

Two views of the same ranks. Dense parameters see (pipeline, replicate, shard, context,
tensor); experts see (pipeline, replicate, expert_shard, expert), where the last two axes
re-divide shard x context x tensor. Ranks close together in number share the innermost axes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from phalanx.config import Job, Parallel
from phalanx.parallel.gloo import use_plain_all_gathers

DENSE_AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """Sizes, this rank's coordinates, and the groups of the axes that are wider than one."""

    parallel: Parallel
    device: torch.device
    rank: int
    world_size: int
    dense: DeviceMesh | None
    sparse: DeviceMesh | None
    offloads_parameters: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        p = self.parallel
        return {
            "pipeline": p.pipeline,
            "replicate": p.replicate,
            "shard": p.data // p.replicate,
            "context": p.context,
            "tensor": p.tensor,
        }

    @cached_property
    def coordinates(self) -> dict[str, int]:
        rest, indices = self.rank, {}
        for axis in reversed(DENSE_AXES):
            rest, indices[axis] = divmod(rest, self.sizes[axis])
        return indices

    @property
    def data_index(self) -> int:
        """Which of the ``parallel.data`` sample streams this rank reads."""
        return self.coordinates["replicate"] * self.sizes["shard"] + self.coordinates["shard"]

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that read the same samples."""
        return self.world_size // self.parallel.data

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold parts of the same pipeline stage."""
        return self.world_size // self.parallel.pipeline

    @property
    def uses_fsdp(self) -> bool:
        """Whether parameters are managed by FSDP2 (else they are plain, with or without DDP)."""
        p, sizes = self.parallel, self.sizes
        sharded = sizes["shard"] * sizes["context"] > 1 and p.zero > 0
        replicated_stages = p.pipeline > 1 and self.stage_ranks > 1
        split = sharded or p.tensor > 1 or p.expert > 1 or replicated_stages
        return split or self.offloads_parameters  # FSDP moves them, also where it shards nothing

    @property
    def uses_ddp(self) -> bool:
        return not self.uses_fsdp and self.stage_ranks > 1

    def axis(self, name: str) -> DeviceMesh | None:
        """One-dimensional mesh of an axis, or None where its size is one."""
        if self.dense is None or self.sizes[name] == 1:
            return None
        return self.dense[name]

    def group(self, name: str) -> dist.ProcessGroup | None:
        axis = self.axis(name)
        return axis.get_group() if axis is not None else None

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """(copies, shards) or (shards,) for dense parameters."""
        assert self.dense is not None
        if self.parallel.zero == 0:
            copies = _merged(self.dense, ("replicate", "context"), self.sizes)
            return _sliced(self.dense, copies, "shard") if copies else self.dense["shard"]
        shards = _merged(self.dense, ("shard", "context"), self.sizes) or "shard"
        if self.parallel.replicate > 1:
            return _sliced(self.dense, "replicate", shards)
        return _sliced(self.dense, shards)

    @cached_property
    def expert_fsdp(self) -> DeviceMesh:
        """(copies, shards) or (shards,) for expert parameters."""
        assert self.sparse is not None
        if self.parallel.replicate > 1:
            return self.sparse["replicate", "expert_shard"]
        return self.sparse["expert_shard"]

    @cached_property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """Ranks that together hold one sequence."""
        if self.dense is None:
            return None
        name = _merged(self.dense, ("context", "tensor"), self.sizes)
        return self.dense[name].get_group() if name else None

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """All ranks of this pipeline stage."""
        if self.dense is None or self.stage_ranks == 1:
            return None
        if self.parallel.pipeline == 1:
            return dist.group.WORLD
        name = _merged(self.dense, DENSE_AXES[1:], self.sizes)
        return self.dense[name].get_group() if name else None


def _merged(mesh: DeviceMesh, axes: tuple[str, ...], sizes: dict[str, int]) -> str | None:
    """Name of the axis that merges those of ``axes`` wider than one; None if there is none."""
    wide = tuple(a for a in axes if sizes[a] > 1)
    if len(wide) > 1:
        name = "_".join(wide)
        mesh[wide]._flatten(name)
        return name
    return wide[0] if wide else None


def _sliced(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Some axes of a mesh, merged ones among them, of which torch 2.11 to 2.13 warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[names]


def forget_meshes() -> None:
    """Have torch forget what it concluded about meshes of an earlier group.

    It keeps the outcome of operators by mesh, and two meshes over the same ranks are the same to
    it: a process that had another rank before would be given the blocks of that rank again.
    """
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()


def build_mesh(job: Job, device: torch.device) -> Mesh:
    """The mesh of a resolved job over the initialised process group, if any."""
    parallel = job.parallel
    if not dist.is_initialized():
        return Mesh(parallel, device, 0, 1, None, None)
    forget_meshes()
    offload = job.memory.offload == "parameters"
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = Mesh(parallel, device, rank, world, None, None, offload)
    assert parallel.pipeline * parallel.data * parallel.context * parallel.tensor == world
    if world == 1 and not offload:
        return plain
    # FSDP needs an axis to shard over even where it has one rank.
    axes = [a for a in DENSE_AXES if plain.sizes[a] > 1 or a == "shard"]
    shape = tuple(plain.sizes[a] for a in axes)
    use_plain_all_gathers()
    dense = init_device_mesh(device.type, shape, mesh_dim_names=tuple(axes))
    sparse = None
    if job.model.moe is not None and plain.uses_fsdp:
        width = plain.sizes["shard"] * parallel.context * parallel.tensor
        sizes = {
            "pipeline": parallel.pipeline,
            "replicate": parallel.replicate,
            "expert_shard": width // parallel.expert,
            "expert": parallel.expert,
        }
        kept = {a: n for a, n in sizes.items() if n > 1 or a == "expert_shard"}
        sparse = init_device_mesh(
            device.type, tuple(kept.values()), mesh_dim_names=tuple(kept.keys())
        )
    return Mesh(parallel, device, rank, world, dense, sparse, offload)
