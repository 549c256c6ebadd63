"""The reference model against its definition."""

import math

import torch
import torch.nn.functional as F

from fp4ext.train import Shape
from fp4ext.train.models import products
from fp4ext.train.models.transformer import Transformer, attend

SHAPE = Shape(layers=2, d=32, heads=2, ffn=64, context=16)


def tokens(seed=0):
    return torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(seed))


def trained():
    """A model whose head is no longer zero."""
    model = Transformer(SHAPE, seed=1)
    torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(2))
    return model


def test_starts_at_ln_256():
    assert abs(Transformer(SHAPE)(tokens(), tokens(1)).item() - math.log(256)) < 1e-5


def test_weights_depend_on_the_seed_only():
    a = Transformer(SHAPE, seed=5).state_dict()
    torch.manual_seed(99)
    b = Transformer(SHAPE, seed=5).state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(
        a["embed.weight"], Transformer(SHAPE, seed=6).embed.weight
    )


def test_is_causal():
    model, x = trained(), tokens()
    changed = x.clone()
    changed[:, 9:] = tokens(3)[:, 9:]
    assert torch.equal(model(x)[:, :9], model(changed)[:, :9]) and not torch.equal(
        model(x)[:, 9:], model(changed)[:, 9:]
    )


def test_rope_depends_on_distance():
    rope = Transformer(SHAPE).rope
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 16, 16)
    scores = rope(q) @ rope(k).transpose(-1, -2)
    torch.testing.assert_close(scores[0, 0, 3, 1], scores[0, 0, 12, 10])


def test_attention():
    q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
    scores = q @ k.transpose(-1, -2) / math.sqrt(8) + torch.full((16, 16), -torch.inf).triu(1)
    torch.testing.assert_close(attend(q, k, v), scores.softmax(-1) @ v)


def test_bf16_products_are_autocasts():
    """Same operands, same roundings; only the order of the sum may differ."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 48)
    served = torch.nn.Sequential(torch.nn.Linear(64, 48))
    served[0].load_state_dict(plain.state_dict())
    products.serve_bf16(served)
    x = torch.randn(4, 7, 64)
    got = []
    for module in (plain, served):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(leaf)
        y.float().square().sum().backward()
        weight = next(module.parameters())
        got.append((y, leaf.grad, weight.grad))
        assert y.dtype == torch.bfloat16 and leaf.grad.dtype == weight.grad.dtype == torch.float32
    for a, b in zip(*got, strict=True):
        assert F.mse_loss(a.float(), b.float()).sqrt() < 2**-8 * a.float().square().mean().sqrt()
    assert list(served[0].state_dict()) == list(plain.state_dict())
