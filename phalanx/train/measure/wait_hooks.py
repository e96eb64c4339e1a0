"""Where training waits for other ranks, and what it sends them: somebody is told of each.

Waits happen in a handful of places: ``Work.wait`` (pipelines, rings, FSDP on gloo), ``wait_tensor``
(functional collectives, compiled ones too), ``Stream.wait_event`` (FSDP on CUDA) and collectives
that block. Each is replaced once in a process by the same with a watcher around it. DDP waits
inside C++, so the engine itself says when.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist

BLOCKING = ("all_reduce", "all_to_all_single")  # that a step calls without async_op


class WaitWatcher(Protocol):
    """Is told when this process begins to wait for peers, and when that is over."""

    def wait_begins(self) -> Any:
        """What ``wait_ends`` is to be given; None: this wait is not looked at."""

    def wait_ends(self, begun: Any) -> None: ...


class SendWatcher(Protocol):
    """Is told of what goes to single ranks."""

    def sent(self, size: int, peer: int, work: Any) -> None:
        """So many bytes are on their way to a rank of their group."""

    def settled(self, work: Any, blocked_seconds: float) -> None:
        """A thread was blocked so long until this was over, or until its stream waits for it."""


_watching: WaitWatcher | None = None  # the newest: a process trains one model at a time
_watching_sends: SendWatcher | None = None
_inside: dict[int, None] = {}  # threads that wait for peers now
_batching: dict[int, None] = {}  # threads that issue several sends as one


def watch(watcher: WaitWatcher) -> None:
    """From now on this watcher is told of waits."""
    global _watching
    _watching = watcher
    if dist.is_available():
        _install()


def watch_sends(watcher: SendWatcher) -> None:
    """From now on this watcher is told of sends."""
    global _watching_sends
    _watching_sends = watcher
    if dist.is_available():
        _install()


def waits_now() -> bool:
    """Whether a thread of this process waits for a collective."""
    return bool(_inside)


def watched(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Make a call that waits for peers; one within another is part of it."""
    watcher, thread = _watching, threading.get_ident()
    if watcher is None or thread in _inside:
        return call(*args, **named)
    _inside[thread] = None
    begun = watcher.wait_begins()
    try:
        return call(*args, **named)
    finally:
        if begun is not None:
            watcher.wait_ends(begun)
        _inside.pop(thread, None)


@functools.cache
def _install() -> torch.library.Library:
    """Replace what waits, once; the cache keeps the library's registrations alive."""
    plain_wait: Any = dist.Work.wait

    def wait(work: Any, *args: Any, **named: Any) -> Any:
        began = perf_counter()
        try:
            return watched(plain_wait, work, *args, **named)
        finally:
            if _watching_sends is not None:
                _watching_sends.settled(work, perf_counter() - began)

    dist.Work.wait = wait  # type: ignore[assignment,method-assign]
    for name in BLOCKING:
        setattr(dist, name, _blocking(getattr(dist, name)))
    dist.batch_isend_irecv = _batch(dist.batch_isend_irecv)
    # Not dist.isend: operations of a batch are told apart by being that very function.
    dist.ProcessGroup.send = _send(dist.ProcessGroup.send)  # type: ignore[method-assign]
    # The class is a stand-in where torch was built without CUDA.
    plain_event: Any = torch.cuda.Stream.wait_event
    torch.cuda.Stream.wait_event = _wait_event(plain_event)  # type: ignore[method-assign]
    library = torch.library.Library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("wait_tensor", _wait_tensor, key)
    return library


def _wait_tensor(tensor: torch.Tensor) -> Any:
    """torch's own, which stays registered for devices in general.

    Not by ``torch.library.get_kernel``: what that gives keeps the interpreter's lock, and every
    other thread of the process would wait as well.
    """
    operator: Any = torch.ops._c10d_functional.wait_tensor.default
    return watched(operator._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd, tensor)


def _blocking(collective: Any) -> Any:
    @functools.wraps(collective)
    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or named.get("async_op"):
            return collective(*args, **named)
        return watched(collective, *args, **named)

    return call


def _batch(plain: Any) -> Any:
    """Sends and receptions at once; NCCL makes one work of them, of which sends alone tell."""

    @functools.wraps(plain)
    def call(ops: list[Any]) -> Any:
        thread, watcher = threading.get_ident(), _watching_sends
        _batching[thread] = None
        try:
            works = plain(ops)
        finally:
            _batching.pop(thread, None)
        sends = [op for op in ops if op.op is dist.isend]
        if watcher is not None and len(works) == len(ops):
            for op, work in zip(ops, works, strict=True):
                if op.op is dist.isend:
                    watcher.sent(_bytes(op.tensor), op.group_peer, work)
        elif watcher is not None and len(works) == 1 and len(sends) == len(ops):
            watcher.sent(sum(_bytes(op.tensor) for op in ops), ops[0].group_peer, works[0])
        return works

    return call


def _send(plain: Any) -> Any:
    @functools.wraps(plain)
    def call(group: Any, tensors: list[torch.Tensor], peer: int, *args: Any, **named: Any) -> Any:
        work = plain(group, tensors, peer, *args, **named)
        if _watching_sends is not None and threading.get_ident() not in _batching:
            _watching_sends.sent(sum(map(_bytes, tensors)), peer, work)
        return work

    return call


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _wait_event(plain: Any) -> Any:
    @functools.wraps(plain)
    def call(stream: Any, event: Any) -> None:
        # Another stream that waits for this one is no wait of the step.
        if stream.cuda_stream == torch._C._cuda_getCurrentRawStream(stream.device_index):
            watched(plain, stream, event)
        else:
            plain(stream, event)

    return call
