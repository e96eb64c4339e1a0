"""What an operation is and costs, by its name and the shapes of its operands."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from phalanx.observe.profile.events import WIDTHS, Operation, TracedWork, numbers, operand_bytes


class Kind(StrEnum):
    """What a step's time is spent on."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ELEMENTWISE = "norm and elementwise"
    OPTIMIZER = "optimizer"
    COPY = "copy"
    COMMUNICATION = "exposed communication"
    DATA = "data wait"
    SYNC = "host sync"
    HOST = "launch gap"


COMPUTE = (Kind.MATMUL, Kind.ATTENTION, Kind.ELEMENTWISE, Kind.OPTIMIZER)

PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
    *("phalanx::matmul", "phalanx::matmul_fp8", "aten::_grouped_mm"),
)
_PRODUCT_KERNELS = ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitkreduce")
_ATTENTION_KERNELS = ("flash", "fmha", "attention", "sdpa")
_COPIES = (
    *("aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::split_with_sizes_copy"),
    *("aten::_chunk_cat", "fsdp::", "aten::fill_", "aten::zero_"),
)
_WAITS = ("c10d::", "_c10d_functional::", "record_param_comms")


def kind_of(work: TracedWork) -> Kind:
    """The class of a piece of work; what the optimizer launches is told by when it did."""
    name, kernel = work.operation.name, work.name.lower()
    if name.startswith(_WAITS):
        return Kind.COMMUNICATION
    if work.copies:
        return Kind.COPY
    if "attention" in name or any(word in kernel for word in _ATTENTION_KERNELS):
        return Kind.ATTENTION
    if name in PRODUCTS or any(word in kernel for word in _PRODUCT_KERNELS):
        return Kind.MATMUL
    if name.startswith(_COPIES):
        return Kind.COPY
    return Kind.ELEMENTWISE


class Product(NamedTuple):
    """A matrix product, or a batch of them."""

    batch: int
    rows: int
    inner: int
    columns: int


def product_of(operation: Operation) -> Product | None:
    """The shape of a product; None for anything else."""
    matrices = [dims for dims in operation.dims if len(dims) >= 2]
    if operation.name not in PRODUCTS or len(matrices) < 2:
        return None
    # What is added comes first, and may be a matrix itself.
    left, right = matrices[-2:] if "add" in operation.name else matrices[:2]
    turned = [value == "True" for value in operation.values if value in ("True", "False")]
    rows, inner = left[-2:]
    if operation.name == "phalanx::matmul" and turned[:1] == [True]:
        rows, inner = inner, rows
    columns = right[-1]
    if operation.name == "phalanx::matmul_fp8" or (
        operation.name == "phalanx::matmul" and turned[1:2] == [True]
    ):
        columns = right[-2]
    return Product(numbers(left[:-2]), rows, inner, columns)


def flops_of(operation: Operation) -> int:
    """FLOPs of a product or of causal attention; 0 for what memory bounds."""
    if (product := product_of(operation)) is not None:
        return 2 * product.batch * product.rows * product.inner * product.columns
    tensors = [dims for dims in operation.dims if len(dims) == 4]
    backward = "backward" in operation.name
    if "scaled_dot_product" not in operation.name or len(tensors) < (4 if backward else 3):
        return 0
    query, key, value = tensors[1:4] if backward else tensors[:3]
    # Two products over half of the scores; backward has five, with the scores made again.
    each = numbers(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return each * 5 // 2 if backward else each


def bytes_of(operation: Operation) -> int:
    """Bytes that it must move at least: operands once, and the result."""
    sizes = [
        (numbers(dims), WIDTHS[kind])
        for dims, kind in zip(operation.dims, operation.types, strict=False)
        if kind in WIDTHS and dims
    ]
    if not sizes:
        return 0
    made, width = max(sizes)
    if (product := product_of(operation)) is not None:
        made = product.batch * product.rows * product.columns
    return operand_bytes(operation) + made * width


def format_of(operation: Operation) -> str:
    """The number format of an operation's first tensor."""
    names = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
    kinds = (kind for kind in operation.types if kind in WIDTHS)
    first = next(kinds, "")
    return "fp8" if "Float8" in first else names.get(first, first)
