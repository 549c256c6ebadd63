"""A second telling of sections 2, 3 and 7, scalar by scalar in numpy fp32, with ml_dtypes' casts: an independent judge.

It knows nothing of blocks of blocks: one block (a list of floats) in, one scale code and its element codes out.
"""

import ml_dtypes
import numpy as np

f = np.float32
FLT_MAX = np.finfo(f).max
E4M3 = [f(v) for v in np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(v, up=False):
    v = f(min(v, f(448)))
    if up:
        return next(code for code, value in enumerate(E4M3) if value >= v)
    return int(np.array(v).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def e2m1(v):
    return int(np.array(f(max(min(v, f(6)), f(-6)))).astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def value(code):
    return f(-E2M1[code - 8] if code >= 8 else E2M1[code])


def outer(A, scale):
    c = f(2688) if scale == "amax" else f(1536)
    s_enc = f(1) if A == 0 else min(f(c / f(A)), FLT_MAX)
    return s_enc, f(f(1) / s_enc)


def enc(code, s_dec):
    return min(f(f(1) / f(E4M3[code] * s_dec)), FLT_MAX)


def codes_of(x, code, s_dec):
    return [e2m1(f(v * enc(code, s_dec))) for v in x]


def power(s_dec):
    """The power of two that brings s_dec into [1, 2); 2^127 where that is out of fp32's range."""
    exponent = int(np.frexp(np.float64(s_dec))[1]) - 1  # s_dec = m·2^exponent, m in [1, 2)
    return f(2.0 ** min(max(-exponent, -126), 127))


def differences(x, code, s_dec):
    p = power(s_dec)
    s = f(f(E4M3[code] * s_dec) * p)
    return [f(f(v * p) - f(value(q) * s)) for v, q in zip(x, codes_of(x, code, s_dec), strict=True)]


def squared(x, code, s_dec):
    total = f(0)
    for d in differences(x, code, s_dec):
        total = f(total + f(d * d))
    return total


def absolute(x, code, s_dec):
    total = f(0)
    for d in differences(x, code, s_dec):
        total = f(total + abs(d))
    return total


def variance(x, code, s_dec):
    total = f(0)
    for v in x:
        y = min(f(abs(v) * enc(code, s_dec)), f(6))
        lo, hi = max(t for t in E2M1 if t <= y), min(t for t in E2M1 if t >= y)
        total = f(total + f(f(f(hi) - y) * f(y - f(lo))))
    return f(total * f(E4M3[code] * E4M3[code]))


def scale(x, s_enc, s_dec, rule, up=False):
    """The E4M3 code of the block x."""
    x = [f(v) for v in x]
    a = max(abs(v) for v in x)
    if a == 0:
        return 0
    if rule == "amax":
        return e4m3(min(f(a * f(s_enc * f(1 / 6))), FLT_MAX), up)
    b = f(f(a / f(6)) * s_enc)
    if rule == "minvar":
        c0 = e4m3(b, up=True)
        candidates, cost = [min(c0 + i, 126) for i in range(6)], variance
    elif rule == "sweep":
        c0 = e4m3(b)
        candidates, cost = [min(max(c0 + i, 1), 126) for i in (0, -1, 1, 4, 5)], squared
    else:
        candidates = [e4m3(b), e4m3(f(b * f(1.5)))]
        cost = {
            "four_over_six": squared,
            "four_over_six_mae": absolute,
            "four_over_six_absmax": lambda *args: max(abs(d) for d in differences(*args)),
        }[rule]
    costs = [cost(x, c, s_dec) for c in candidates]
    return candidates[costs.index(min(costs))]


def eden(x, A, rule, random, together):
    """(codes, stored scale codes, global_scale) of a rotated vector: x [n], random [n/16] 16-bit integers.

    together: how many elements share a correction S, n or 16."""
    x = [f(v) for v in x]
    val_max = 6 / ((17 / 16) * 0.93)
    if rule == "amax":
        g = f(1) if A == 0 else f(f(A) / f(255.99 * val_max))
        s = [e4m3(f(max(abs(v) for v in x[i : i + 16]) / f(f(val_max) * g))) for i in range(0, len(x), 16)]
    else:
        s_enc, g = outer(A, rule)
        s = [scale(x[i : i + 16], s_enc, g, rule) for i in range(0, len(x), 16)]
    codes = [q for i, c in enumerate(s) for q in codes_of(x[16 * i : 16 * i + 16], c, g)]
    p, S = power(g), []
    for start in range(0, len(x), together):
        over = under = f(0)
        for i in range(start, start + together):
            v = f(x[i] * p)
            over = f(over + f(v * v))
            under = f(under + f(v * f(value(codes[i]) * f(f(E4M3[s[i // 16]] * g) * p))))
        ok = np.isfinite(over) and np.isfinite(under) and over > 0 and under > 0
        S += [f(over / under) if ok else f(1)] * (together // 16)
    gain = f(1.0067) if rule == "sweep" else f(1)
    stored = []
    for c, correction, r in zip(s, S, random, strict=True):
        t = f(min(f(E4M3[c] * f(correction / gain)), f(448)))
        lo = max(i for i, v in enumerate(E4M3) if v <= t)
        if E4M3[lo] == t:
            stored.append(lo)
            continue
        fraction = (float(t) - float(E4M3[lo])) / (float(E4M3[lo + 1]) - float(E4M3[lo]))
        stored.append(lo + int(fraction + (int(r) + 0.5) / 65536 >= 1))
    return codes, stored, f(g * gain)


def mx(x, rule, max_elem, emax, min_elem):
    """The E8M0 byte of a block: through exact Python integers and floats."""
    a = f(max(abs(f(v)) for v in x))
    if a == 0:
        return 0
    if rule == "ceil":
        r = f(a * f(1 / max_elem))
        m, e = np.frexp(np.float64(r))  # r = m·2^e, m in [.5, 1)
        e = int(e) - 1 + (m != 0.5)
        e = max(e, -126) if r > 0 else -127
    else:
        e = int(np.frexp(np.float64(a))[1]) - 1 - emax
    return min(max(e, -126 - int(np.log2(min_elem))), 127 - emax) + 127
