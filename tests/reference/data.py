"""Inputs of the tests here, and how outputs are compared."""

import torch


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def student_t3(*shape, seed=0):
    """A Gaussian over the root of a mean of three squares."""
    g = generator(seed)
    return torch.randn(*shape, generator=g) / torch.randn(3, *shape, generator=g).square().mean(0).sqrt()


def outliers(*shape, gain=30.0, seed=0):
    """Gaussian, one entry in 128 times `gain`."""
    g = generator(seed)
    x = torch.randn(*shape, generator=g)
    return torch.where(torch.rand(*shape, generator=g) < 1 / 128, x * gain, x)


def one_hot(rows, k, seed=0):
    """Each row has a single 1."""
    return torch.eye(k)[torch.randint(k, (rows,), generator=generator(seed))]


def wide(*shape, seed=0):
    """Exponents from 2^-12 to 2^12 inside each block."""
    g = generator(seed)
    return torch.randn(*shape, generator=g) * torch.exp2(torch.randint(-12, 13, shape, generator=g).float())


def uneven(rows, k, seed=0):
    """Each 16 elements 2^-8 to 2^8 times a Gaussian: block scales so far apart that fp32 sums of them must round."""
    g = generator(seed)
    gain = torch.exp2(torch.randint(-8, 9, (rows, -(-k // 16)), generator=g).float())
    return torch.randn(rows, k, generator=g) * gain.repeat_interleave(16, -1)[:, :k]


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of t."""
    return torch.atleast_1d(t).contiguous().view(torch.uint8)


def same(a, b) -> bool:
    """Whether two (codes, scales, global_scale) agree in shape, dtype and every byte."""
    return all(
        p.shape == q.shape and p.dtype == q.dtype and torch.equal(raw(p), raw(q)) for p, q in zip(a, b, strict=True)
    )
