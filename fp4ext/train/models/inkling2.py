"""transformers' own Inkling2ForCausalLM, in a small configuration and over bytes: a model that fp4ext did not write.

`convert` takes the experts and the projections of attention. Router, norms, convolutions, residual attention, embedding
and head stay as they are, and run in fp32, as the model's authors have it. So autocast is not around the model but
around what may be converted alone: those products have BF16 operands and results in every arm, bf16 included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

import fp4ext
from fp4ext.errors import Refused
from fp4ext.nn import transformers_experts

from ..runs.presets import Shape
from . import products

LEAST = (5, 24)


def version() -> str:
    """Of transformers. Raises ImportError without it."""
    import transformers

    return transformers.__version__


def check() -> None:
    """Raises Refused without transformers 5.24 or later."""
    try:
        have = version()
    except ImportError:
        raise Refused(
            "--model inkling2-tiny: needs transformers, which is not installed; accepted: after "
            "pip install 'fp4ext[transformers]'"
        ) from None
    if tuple(map(int, have.split(".")[:2])) < LEAST:
        least = ".".join(map(str, LEAST))
        raise Refused(f"--model inkling2-tiny: transformers is {have}; accepted: {least} or later")


def build(shape: Shape, seed: int) -> nn.Module:
    """The model, its weights decided by the seed. One layer in six attends to everything, as in the original."""
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig
    from transformers.utils import logging

    logging.get_logger("transformers.integrations").setLevel(logging.ERROR)  # no word on kernels that CUDA would have
    heads = {"attention_heads": shape.heads, "key_value_heads": max(1, shape.heads // 2)}
    config = Inkling2TextConfig(
        vocab_size=shape.vocab,
        unpadded_vocab_size=shape.vocab,
        eos_token_id=None,
        hidden_size=shape.d,
        num_hidden_layers=shape.layers,
        **{f"{kind}num_{name}": count for kind in ("", "swa_") for name, count in heads.items()},
        head_dim=shape.head_dim,
        swa_head_dim=shape.head_dim,
        sliding_window_size=max(1, shape.context // 4),
        rel_extent=shape.context,
        max_position_embeddings=shape.context,
        n_layers_per_attn_res_block=max(1, shape.layers // 2),
        moe_intermediate_size=shape.expert_ffn,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        route_scale=float(shape.top_k),
        initializer_range=0.05,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Inkling2ForCausalLM(config)


@contextmanager
def silent() -> Iterator[None]:
    """Without transformers' own progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def reading() -> Iterator[None]:
    """Let transformers read experts of the release's layout into this class.

    transformers (5.24) knows their NVFP4 for the class inkling2_loop alone. Its public registry of conversions gives
    inkling2 that reader too, for the time of this context.
    """
    from transformers import conversion_mapping

    kind = "inkling2_text"
    own, loop = (conversion_mapping.get_checkpoint_conversion_mapping(k) for k in (kind, "inkling2_loop_text"))
    experts = lambda reader: any("experts" in pattern for pattern in reader.source_patterns)  # noqa: E731
    both = [r for r in loop if experts(r)] + [r for r in own if not experts(r)]
    conversion_mapping.register_checkpoint_conversion_mapping(kind, both, overwrite=True)
    try:
        yield
    finally:
        conversion_mapping.register_checkpoint_conversion_mapping(kind, own, overwrite=True)


def convert(model: nn.Module, policy: fp4ext.Policy) -> fp4ext.Report:
    """By a policy. Under bf16 the experts too become fp4ext's, which know autocast, and quantize nothing."""
    if policy.name != "bf16":
        report = fp4ext.convert(model, policy)
    else:
        fp4ext.revert(model)
        for name, module in model.named_modules():
            if transformers_experts.is_stacked(module):
                transformers_experts.swap(module)
                module.set_policy(policy, name)
        report = fp4ext.Report(policy.name)
    native = products.native(next(model.parameters()).device)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, transformers_experts.Stacked)) and not policy.keeps(name):
            _in_bf16(module)
            if not native:
                products.serve_bf16(module)
    return report


@torch.no_grad()
def decoded(shape: Shape, model: nn.Module, policy: fp4ext.Policy) -> nn.Module:
    """A plain model of the same weights, its experts as the policy's sampler quantizes them."""
    plain = build(shape, seed=0)
    plain.load_state_dict(model.state_dict())
    for name, module in plain.named_modules():
        if transformers_experts.is_stacked(module):
            spec = policy.recipe("rl_sampler", name).fprop.w
            for w in module.parameters(recurse=False):
                w.copy_(fp4ext.grouped_quantize(w, spec, role="w").dequantize(torch.float32))
    return plain.eval()


def _in_bf16(module: nn.Module) -> None:
    """Run the module under autocast, and give its result in fp32."""
    entered: list[torch.autocast] = []

    def before(module, given):
        entered.append(torch.autocast(given[0].device.type, torch.bfloat16))
        entered[-1].__enter__()

    def after(module, given, out):
        entered.pop().__exit__(None, None, None)
        return None if out is None else out.float()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
