"""What the names of a checkpoint's tensors say: which are linear layers' matrices, which experts, which go together.

Names are all there is: no model class is needed, so a checkpoint of any architecture can be quantized from its files.
"""

from __future__ import annotations

import re
from collections.abc import Container
from fnmatch import fnmatchcase

SEPARATE = re.compile(r"^(?P<experts>.*\bexperts)\.(?P<e>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
STACK = re.compile(r"^(?P<experts>.*\bexperts)\.(?P<part>gate_up_proj|down_proj|w13_weight|w2_weight)$")
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

# What a fused reader multiplies as one matrix, and so wants under one outer scale.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)

# Architectures whose stacked experts are [E, K, N] as plain parameters, contraction in the middle.
TRANSPOSED = ("gpt_oss",)
# Architectures whose matrices are those of transformers' Conv1D, [K, N].
CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
# Stacks whose rows alternate g0, u0, g1, u1, …; elsewhere all of gate comes first.
ALTERNATING = ("w13_weight",)

NOT_LINEAR = ("*embed*", "*embd*", "wte", "wpe", "*norm*", "*conv*", "lm_head", "unembed")


# self_attn.k_scale (compressed-tensors, vLLM), self_attn.k_proj.k_scale (modelopt), self_attn.kv_scale.
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")


def module(name: str) -> str:
    """The module that a weight belongs to, by which a policy chooses."""
    return name.removesuffix(".weight")


def module_of(name: str) -> str:
    """The module in a model: that of the experts for a stack and for one of its matrices, else `module`."""
    match = SEPARATE.match(name) or STACK.match(name)
    return match["experts"] if match else module(name)


def of_stack(name: str) -> tuple[str, str]:
    """(the module of the experts, which of its stacks) of a name that STACK matches."""
    match = STACK.match(name)
    assert match is not None, name
    return match["experts"], match["part"]


def of_expert(name: str) -> tuple[str, int, str]:
    """(the experts' module, the expert's number, its projection by PARTS) of a name that SEPARATE matches."""
    match = SEPARATE.match(name)
    assert match is not None, name
    return match["experts"], int(match["e"]), PARTS.get(match["part"], match["part"])


def is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds the matrices of several experts, [E, ., .]."""
    return len(shape) == 3 and "experts" in name.split(".")


def why_not_linear(name: str, shape: tuple[int, ...]) -> str | None:
    """Why a plain tensor is no matrix of a linear layer, None where it may be one."""
    if is_stack(name, shape):
        return None
    if len(shape) < 2:
        return f"{len(shape)}-D"
    if len(shape) > 2:
        return f"{len(shape)}-D, and no stack of experts"
    if not name.endswith(".weight"):
        return "its name does not end with .weight"
    parts = [part.lower() for part in module(name).split(".")]
    if any(fnmatchcase(part, pattern) for part in parts for pattern in NOT_LINEAR):
        return "an embedding, norm, convolution or head, by its name"
    return None


def together(name: str, names: Container[str]) -> tuple[str, ...]:
    """The weights, this one among them, that share an outer scale with it."""
    prefix, _, last = module(name).rpartition(".")
    dot = "." if prefix else ""
    for group in TOGETHER:
        if last in group:
            return tuple(other for part in group if (other := f"{prefix}{dot}{part}.weight") in names)
    return (name,)


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of an attention layer's KV cache (or of its queries), and no weight."""
    return name.endswith(CACHE_SCALES)


def natural(name: str) -> list:
    """A key that sorts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]
