"""Audit: tell noise from drift, estimate what each choice costs, and choose the precision of each component.

    report = fp4ext.audit.measure(model, batches, policies=["nvidia", "end_to_end"])
    for fault in report.faults: print(fault.module, fault.gemm, fault.what, fault.text)

averaging.py has the mathematics: averages reduce a random error and keep a drift, and the model
err(B) = variance/B + floor separates the two. capture.py records the inputs and output gradients of each layer,
operand.py and layer.py measure what quantization does to them, and report.py lists the faults.
"""

from ..extras import audit as _packages  # noqa: F401  (first: an ImportError that names the extra)
from .advice import Advice, advise
from .cost_model import Cost, Shape, cost
from .live import Monitor
from .measurement import measure
from .report import Fault, Report

__all__ = ["Advice", "Cost", "Fault", "Monitor", "Report", "Shape", "advise", "cost", "measure"]
