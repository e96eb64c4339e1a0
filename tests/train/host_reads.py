"""Forbids what would make the host wait for the device, also where the device is the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Reading a scalar, sizes that depend on data, and fresh tensors made from host values.
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh", "masked_select"}


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} reads or writes a value across host and device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Any host read of a tensor inside raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was read on the host")

    with pytest.MonkeyPatch.context() as patch, _Watch():
        for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield
