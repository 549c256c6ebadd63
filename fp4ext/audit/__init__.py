"""Audit: tell noise from drift, price every choice, and pick the precision of each component deliberately.

    report = fp4ext.audit.measure(model, batches, policies=["nvidia", "end_to_end"])
    for fault in report.faults: print(fault.module, fault.gemm, fault.what, fault.text)

averaging.py has the mathematics: a random error dilutes in averages, a drift compounds, and the law
err(B) = variance/B + floor tells one from the other. capture.py records what each layer reads and is told, operand.py
and layer.py judge it, report.py names what is wrong.
"""

from ..extras import audit as _packages  # noqa: F401  (first: an ImportError that names the extra)
from .advice import Advice, advise
from .cost_model import Cost, Shape, cost
from .live import Monitor
from .measurement import measure
from .report import Fault, Report

__all__ = ["Advice", "Cost", "Fault", "Monitor", "Report", "Shape", "advise", "cost", "measure"]
