"""Weights by name, of every kind: what the tests of `save` write, and what must be equal."""

import torch

from fp4ext import QTensor, Spec
from fp4ext.testing import assert_bytes_equal, generate

SWEEP = Spec("nvfp4", "sweep", outer="pow2")
MXFP4 = Spec("mxfp4")


def weight(*shape, seed=0):
    return generate("student_t3", *shape, seed=seed, dtype=torch.bfloat16)


def same(a: QTensor, b: QTensor):
    assert a.format is b.format and a.shape == b.shape
    for name, t in a.tensors().items():
        assert_bytes_equal(t, b.tensors()[name], name)


def dense_model():
    """Names of every kind."""
    return {
        "model.embed_tokens.weight": weight(80, 64),
        "model.layers.0.self_attn.q_proj.weight": weight(64, 64, seed=1),
        "model.layers.0.self_attn.k_proj.weight": weight(32, 64, seed=2) * 3,
        "model.layers.0.self_attn.v_proj.weight": weight(32, 64, seed=3) / 8,
        "model.layers.0.self_attn.q_proj.bias": weight(64),
        "model.layers.0.self_attn.o_proj.weight": weight(64, 64, seed=4),
        "model.layers.0.mlp.gate_proj.weight": weight(96, 64, seed=5),
        "model.layers.0.mlp.up_proj.weight": weight(96, 64, seed=6) * 9,
        "model.layers.0.mlp.down_proj.weight": weight(64, 96, seed=7),
        "model.layers.0.mlp.gate.weight": weight(64, 64, seed=8),
        "model.layers.0.conv.weight": weight(64, 1, 4),
        "model.layers.0.norm.weight": weight(64),
        "model.layers.0.tiny.weight": weight(8, 64),
        "model.layers.0.odd.weight": weight(64, 40),
        "model.layers.0.half.weight": weight(64, 64).double(),
        "lm_head.weight": weight(80, 64, seed=9),
    }


def experts(arrangement: str, alternating=False):
    """One layer's experts, 3 of [2·32 × 64] and [64 × 32], and the plain weight of each projection."""
    gate, up, down = weight(3, 32, 64, seed=1), weight(3, 32, 64, seed=2) * 4, weight(3, 64, 32, seed=3)
    truth = {f"m.experts.{e}.{part}.weight": t[e] for e in range(3) for part, t in
             (("gate_proj", gate), ("up_proj", up), ("down_proj", down))}  # fmt: skip
    halves, rows = torch.cat((gate, up), 1), torch.stack((gate, up), 2).reshape(3, 64, 64)
    source = {
        "separate": truth,
        "w123": {
            n.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"): t
            for n, t in truth.items()
        },  # fmt: skip
        "stacked": {"m.experts.gate_up_proj": halves, "m.experts.down_proj": down},
        "alternating": {"m.experts.w13_weight": rows, "m.experts.w2_weight": down},
        "gpt-oss": {"m.experts.gate_up_proj": rows.mT, "m.experts.down_proj": down.mT},
    }
    return source[arrangement], truth
