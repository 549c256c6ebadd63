"""backends: which GEMM backends this machine can run, and why it cannot run the others."""

from __future__ import annotations

import torch

from .. import _C
from . import cublas


def backends() -> dict[str, str]:
    """The GEMM backends by name, each with "available: …" and what it uses, or with the reason why it is not available.

    All but "cpu" refer to the current CUDA device.

    - cpu: the C++ kernels, on every machine.
    - emulated: fp4ext's own kernels on operands converted to bf16; sm_80 and later.
    - fast: torch's product of operands converted to bf16; not row-invariant.
    - cublas: torch's scaled_mm on codes and scales; sm_100 and later; not row-invariant.
    - native: the block-scaled tensor cores of Blackwell. The first call tests them on this device; on sm_100 the line
      also says whether pairs of thread blocks passed, and are used.

    The lines of fp4ext's own kernels say which nvcc compiled them.
    """
    runs, threads = ", ".join(_C.isas()), torch.get_num_threads()
    report = {"cpu": f"available: {_C.isa()} in use, this CPU runs {runs}, {threads} threads"}
    if not _C.cuda_kernel_sets or not torch.cuda.is_available():
        why = "built, but torch finds no CUDA device" if _C.cuda_kernel_sets else f"not built: {_C.build_note}"
        return report | dict.fromkeys(("emulated", "fast", "cublas", "native"), why)
    device = torch.cuda.current_device()
    compiled = f"; compiled by nvcc {_C.nvcc}"
    report["emulated"] = _C.emulated_status(device) + compiled
    report["fast"] = _C.fast_status(device)
    report["cublas"] = cublas.status(device)
    report["native"] = _C.native_status(device) + compiled
    return report
