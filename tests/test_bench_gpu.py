"""bench_gpu asks the ops for what they have: each thing that it measures runs, small, on the CPU."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parent.parent / "benchmarks" / "bench_gpu.py"


def test_everything_it_measures_runs():
    spec = importlib.util.spec_from_file_location("bench_gpu", PATH)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    measured = [(name, "", f) for name, _, f in bench.quantizers(128, "cpu")]
    timed = [
        *bench.products([(128, 128), (1, 128)], ["auto"], "cpu"),
        *bench.steps(32, 128, ("mxfp8", "end_to_end"), "cpu"),
    ]
    for name, by, _, ours, theirs in timed:
        measured += [(name, by, ours), (name, "torch", theirs)]
    for _, _, run in measured:
        run()
    names = {name for name, _, _ in measured}
    assert {"row", "rowcol", "row SR", "gemm 128", "decode 1", "decode 1 bf16", "step 32×128"} <= names
