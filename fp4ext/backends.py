"""backends: what this machine can run, and why not the rest."""

from __future__ import annotations

import torch

from . import _C


def backends() -> dict[str, str]:
    """Each backend → "available", with what it uses, or the reason why not.

    cpu: the C++ kernels, everywhere. emulated, cublas, native: CUDA (docs/architecture.md), not in this build unless it
    says so.
    """
    runs, threads = ", ".join(_C.isas()), torch.get_num_threads()
    report = {"cpu": f"available: {_C.isa()} in use, this CPU runs {runs}, {threads} threads"}
    if not _C.cuda_rooms:
        why = f"not built: {_C.build_note}"
    elif not torch.cuda.is_available():
        why = "built, but torch finds no CUDA device"
    else:
        why = "built, but no op is bound to it yet"
    return report | dict.fromkeys(("emulated", "cublas", "native"), why)
