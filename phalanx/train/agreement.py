"""What ranks tell each other with every step: tokens that count, and who wants what."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.parallel import Mesh, all_sum


class AgreedStep(NamedTuple):
    """What all ranks know of a step."""

    stop: bool  # all leave after it
    labels: int  # tokens of its batch that have one
    damaged: int  # samples of its batch
    same_shares: bool  # all want the same
    may_write: bool  # all may write a checkpoint
    keepers_late: bool  # somebody's last snapshot is not safe within its deadline
    failure_rate: int  # that all have heard of; 0: they have not yet


class Agreement:
    """One small reduction a step: how many tokens count, how many samples are damaged, and
    whether anybody wants to stop.

    The tokens stay on the device. The rest is copied to the host behind the step's work and read
    at its end, when the device passed this point long ago. The copy has a stream of its own: the
    device copies one thing after the other, and behind a snapshot the step's kernels would wait.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        cuda = mesh.device.type == "cuda"
        # Pinned, or the copies would make the host wait; reused, which `outcome` makes safe.
        self._host = torch.zeros(7, dtype=torch.float64, pin_memory=cuda)
        self._answer = torch.zeros(7, dtype=torch.float64, pin_memory=cuda)
        self._stream = torch.cuda.Stream(mesh.device) if cuda else None
        self._copied = torch.cuda.Event() if cuda else None

    def start(
        self,
        real_tokens: int,
        damaged: int,
        stop_requested: bool,
        shares: tuple[int, ...] = (),
        may_write: bool = True,
        keeper_late: bool = False,
        failure_rate: int = 0,
    ) -> Tensor:
        """Tell the others; returns the real tokens of the global batch, on the device."""
        self._host[0] = real_tokens / self._mesh.ranks_per_sample
        self._host[1] = damaged / self._mesh.ranks_per_sample
        self._host[2] = float(stop_requested)
        self._host[3] = float(zlib.crc32(repr(shares).encode()) if shares else 0)
        self._host[4] = float(may_write)
        self._host[5] = float(keeper_late)
        self._host[6] = float(failure_rate)
        values = all_sum(self._host.to(self._mesh.device, non_blocking=True, copy=True))
        if self._stream is None or self._copied is None:
            self._answer.copy_(values)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._answer.copy_(values, non_blocking=True)
            self._copied.record(self._stream)
            values.record_stream(self._stream)
        return values[0].round().float()

    def outcome(self) -> AgreedStep:
        """What the others told."""
        if self._copied is not None:
            self._copied.synchronize()
        labels, damaged, stop, shares, may_write, late, rate = self._answer.tolist()
        own, heard, world = float(self._host[3]), float(self._host[6]), self._mesh.world_size
        return AgreedStep(
            stop=stop > 0,
            labels=round(labels),
            damaged=round(damaged),
            same_shares=own > 0 and shares == own * world,
            may_write=round(may_write) == world,
            keepers_late=late > 0,
            failure_rate=round(heard) if rate == heard * world else 0,
        )
