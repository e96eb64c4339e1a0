"""A product with a known answer, again and again: whether a device computes right numbers.

Small whole numbers: every sum is exact in float32 whatever the order of additions, so one wrong
bit anywhere is a fault of the device and not a matter of rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding

if TYPE_CHECKING:
    import torch

LARGEST = 8  # of the numbers that are multiplied; exact in every format down to bfloat16
QUICK_SIDE, FULL_SIDE, CUDA_SIDE = 128, 512, 4096
QUICK_TIMES, FULL_TIMES = 3, 20


def devices() -> list[str]:
    """The processor, and every GPU that this process sees."""
    from phalanx.hardware import count_cuda

    if count_cuda() == 0:
        return ["cpu"]
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def known_product(side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices of whole numbers, and their product from a closed form (no device is asked).

    left[i, k] = u[i] + a[k], right[k, j] = v[j] + b[k]; the sum over k of their product is
    side·u·v + u·Σb + v·Σa + Σab.
    """
    import torch

    index = torch.arange(side, dtype=torch.int64)
    half = LARGEST // 2
    u, v = index * 7 % (half + 1), index * 5 % (half + 1) - half
    a, b = index * 3 % (half + 1), index * 11 % (half + 1) - half
    left, right = u[:, None] + a[None, :], v[None, :] + b[:, None]
    answer = (
        side * u[:, None] * v[None, :] + u[:, None] * b.sum() + v[None, :] * a.sum() + (a * b).sum()
    )
    assert int(answer.abs().max()) < 2**24, "a sum that float32 cannot hold"
    return left, right, answer


def check_product(device: str, *, quick: bool, inject: bool = False) -> Finding:
    """Multiply on a device until we trust it; ``inject`` flips one bit of one result (a drill)."""
    import torch

    side = QUICK_SIDE if quick else CUDA_SIDE if device.startswith("cuda") else FULL_SIDE
    times = QUICK_TIMES if quick else FULL_TIMES
    left, right, answer = known_product(side)
    # Sums of parts are kept in float32, so that the result is rounded once.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    kinds = [torch.float32, torch.bfloat16] if device.startswith("cuda") else [torch.float32]
    wrong, products = 0, 0
    where = ""
    for kind in kinds:
        here = left.to(device, kind), right.to(device, kind)
        # Rounded once from the exact sum, as the device does.
        wanted = answer.to(torch.float32).to(kind).to(device)
        for turn in range(times):
            product = here[0] @ here[1]
            if inject and turn == times - 1:
                _flip(product)
            bad = product != wanted
            products += 1
            if bool(bad.any()):
                wrong += int(bad.sum())
                row, column = (int(n) for n in bad.nonzero()[0])
                where = where or (
                    f"product {turn} at ({row}, {column}): {float(product[row, column])} "
                    f"instead of {float(wanted[row, column])}"
                )
    measured: dict[str, float | int | str] = {
        "products": products,
        "side": side,
        "wrong_elements": wrong,
    }
    if where:
        measured["first"] = where
    return Finding(
        check=f"matmul {device}",
        verdict="fail" if wrong else "pass",
        measured=measured,
        expected="0 wrong elements",
        suggestion="take the node out and have the device replaced" if wrong else "",
        cause=Cause.SILENT_CORRUPTION if wrong else "",
    )


def _flip(product: torch.Tensor) -> None:
    """One bit of one element, as a broken adder would."""
    import torch

    whole = torch.int16 if product.element_size() == 2 else torch.int32
    bits = product.view(whole)
    bits[1, 1] ^= 1 << (whole.itemsize * 8 - 4)


def check_repeats(device: str, *, quick: bool) -> Finding:
    """The same product of arbitrary numbers has the same bits every time."""
    import torch

    side = QUICK_SIDE if quick else CUDA_SIDE // 2 if device.startswith("cuda") else FULL_SIDE
    made = torch.Generator().manual_seed(1)
    left, right = (torch.randn(side, side, generator=made).to(device) for _ in range(2))
    first = left @ right
    times = QUICK_TIMES if quick else FULL_TIMES
    differing = sum(not torch.equal(left @ right, first) for _ in range(times))
    return Finding(
        check=f"repeat {device}",
        verdict="fail" if differing else "pass",
        measured={"products": times, "differing": differing},
        expected="0 differing",
        suggestion="take the node out and have the device replaced" if differing else "",
        cause=Cause.SILENT_CORRUPTION if differing else "",
    )
