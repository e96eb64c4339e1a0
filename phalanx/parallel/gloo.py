"""All-gathers on gloo that leave the heap alone.

A gloo group of torch (2.8 to 2.13) has two threads. Each, when a collective is done, writes its
name into one ``std::string`` of the group without a lock. Names up to 15 letters lie in the string
itself, and the worst is a mixed-up name in the flight recorder. ``ALLGATHER_COALESCED`` lies on
the heap: of two threads that end at once one writes into what the other has freed, and the process
dies later in some malloc, or goes on with bytes that are wrong. The functional all-gather (ours,
DTensor's, the backward of a reduce-scatter) takes that path for a single tensor, too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def use_plain_all_gathers() -> torch.library.Library:
    """From now on functional all-gathers of CPU tensors go by ``ALLGATHER``, in this process."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    return library  # the cache keeps it: with the object the registration would go


def _all_gather(x: Tensor, group_size: int, group: object) -> Tensor:
    """``_c10d_functional::all_gather_into_tensor``, to be waited for as usual."""
    if x.is_complex():
        return torch.view_as_complex(_all_gather(torch.view_as_real(x), group_size, group))
    gathered = x.new_empty((x.shape[0] * group_size, *x.shape[1:]))
    out: Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(
        x, group_size, group, out=gathered
    )
    return out
