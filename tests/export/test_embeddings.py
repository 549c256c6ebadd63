"""Real weights: a 22 M-parameter encoder, quantized from its files, loaded packed; how far its embeddings move."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_order_of_formats_on_a_real_encoder(tmp_path):
    """MXFP8 above all, then sweep, four_over_six, amax, in cosine and in the error of the weights.

    The figures are those of docs/measured/sentence_embeddings.md; bounds leave a fifth of each distance from 1.
    """
    where = ROOT / "examples" / "sentence_embeddings.py"
    spec = importlib.util.spec_from_file_location("sentence_embeddings", where)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # dataclasses look their module up
    spec.loader.exec_module(example)
    folder = example.packaged()
    given = tmp_path, *example.encoder(folder)
    names = ["mxfp8", "nvfp4 sweep", "nvfp4 four_over_six", "nvfp4 amax"]
    rows = [example.measure(folder, name, example.SPECS[name], *given) for name in names]
    assert [r.matrices for r in rows] == [36] * 4
    for better, worse in zip(rows, rows[1:], strict=False):
        assert better.cosine >= worse.cosine and better.cosine_inputs >= worse.cosine_inputs, (better, worse)
        assert better.error < worse.error
    for row, cosine in zip(rows, (0.99856, 0.98202, 0.97824, 0.97822), strict=True):
        assert abs(row.cosine - cosine) <= (1 - cosine) / 5, row
    for row, error in zip(rows, (0.701e-3, 6.688e-3, 7.523e-3, 8.911e-3), strict=True):
        assert row.error == pytest.approx(error, rel=1e-3)
    for row, bits in zip(rows, (8.25, 4.5, 4.5, 4.5), strict=True):
        assert row.bits == pytest.approx(bits, abs=0.01)
    assert rows[1].bytes < 0.6 * (folder / "model.safetensors").stat().st_size
