"""backends: what this machine can run, and why not the rest."""

from __future__ import annotations

import torch

from .. import _C
from . import cublas


def backends() -> dict[str, str]:
    """Each backend → "available", with what it uses, or the reason why not.

    cpu: the C++ kernels, everywhere. The others are about the current CUDA device.
    emulated: both operands as bf16, from sm_80 on.
    fast: likewise, but the product is torch's; not row-invariant.
    cublas: torch's scaled_mm on codes and scales, from sm_100 on; not row-invariant.
    native: the block-scaled tensor cores of Blackwell, once they have passed a test on this device (the first call's);
        on sm_100 also whether pairs of thread blocks did, and are used.
    """
    runs, threads = ", ".join(_C.isas()), torch.get_num_threads()
    report = {"cpu": f"available: {_C.isa()} in use, this CPU runs {runs}, {threads} threads"}
    if not _C.cuda_kernel_sets or not torch.cuda.is_available():
        why = "built, but torch finds no CUDA device" if _C.cuda_kernel_sets else f"not built: {_C.build_note}"
        return report | dict.fromkeys(("emulated", "fast", "cublas", "native"), why)
    device = torch.cuda.current_device()
    report["emulated"] = _C.emulated_status(device)
    report["fast"] = _C.fast_status(device)
    report["cublas"] = cublas.status(device)
    report["native"] = _C.native_status(device)
    return report
