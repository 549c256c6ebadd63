"""Quantizing against stored scales: what did not change keeps its bytes."""

import pytest
import torch

from fp4ext import QTensor, Spec, quantize
from fp4ext.export import Refused, load, save
from fp4ext.testing import assert_bytes_equal, generate

from .weights import MXFP4, SWEEP, dense_model


@pytest.mark.parametrize("policy", ["end_to_end", "nvfp4/four_over_six", "mxfp8", "mxfp4", "nvidia"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unchanged_weights_keep_their_bytes(policy, dtype, tmp_path):
    """From the decoded weights, in the dtype that a trainer holds: the very same file. The rule need not be known."""
    source = dense_model()
    save(source, tmp_path / "a", policy=policy)
    decoded = {n: w.dequantize(dtype) if isinstance(w, QTensor) else w for n, w in load(tmp_path / "a").items()}
    report = save(decoded, tmp_path / "b", policy=policy, like=tmp_path / "a")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert not report.clipped
    name = "model.layers.0.mlp.down_proj.weight"
    at = int(decoded[name][5].nonzero()[0])
    decoded[name][5, at] *= -1
    decoded[name][6, 0] = 1e4
    report = save(decoded, tmp_path / "c", policy=policy, like=tmp_path / "a")
    old, new = (load(tmp_path / x)[name].dequantize(torch.float32) for x in "ac")
    assert {tuple(where) for where in (old != new).nonzero().tolist()} == {(5, at), (6, 0)}
    assert report.clipped == {name: 1} and "1 elements in 1 weights were clipped" in str(report)


def test_against_is_the_quantizers_rounding(tmp_path):
    """New weights in their own stored scales: the quantizer's codes again, ties and signs of zero included."""
    from fp4ext.export.against import against
    from fp4ext.export.stored import Stored

    for kind in ("gaussian", "student_t3", "integers", "zeros", "wide"):
        for spec in (SWEEP, Spec("nvfp4"), Spec("nvfp4", outer="row"), Spec("mxfp8"), Spec("mxfp8_e5m2"), MXFP4):
            x = generate(kind, 48, 128, seed=3)
            q = quantize(x, spec)
            made, clipped = against(x, Stored.of(q))
            values = (made.q.dequantize(torch.float32), q.dequantize(torch.float32))
            assert_bytes_equal(values[0] + 0.0, values[1] + 0.0, f"{kind} {spec}")
    with pytest.raises(ValueError, match=r"accepted: \(48, 128\)"):
        against(x[1:], Stored.of(q))


def test_like_must_be_of_the_same_layout(tmp_path):
    save(dense_model(), tmp_path / "a", "modelopt")
    with pytest.raises(Refused, match="like is in layout modelopt; accepted: compressed-tensors"):
        save(dense_model(), tmp_path / "b", like=tmp_path / "a")
