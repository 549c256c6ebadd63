"""Whole layers and whole training steps by policy, beside BF16, ratios measured in the same run.

    python benchmarks/bench_linear.py [--quick] [--threads 2] [--policies bf16,quartet2]

A layer's time is a forward and a backward with all gradients, quantization included, under BF16 autocast with fp32
master weights; torch's own is nn.Linear (for experts, a loop of them) under the same autocast, and in fp32, since
autograd's BF16 products are very slow on a CPU without BF16 instructions. A step is one update of the reference run's
preset, where BF16 products go through the fp32 units on such a CPU (fp4ext/train/models/products.py): the ratio that
counts there.
"""

from __future__ import annotations

import torch
from timing import best_times, parser, publish, show, write_rows
from torch import nn

import fp4ext
from fp4ext.train.pretraining.arm import Arm
from fp4ext.train.runs import presets

LAYERS = {"linear": (512, 1024, 2048), "linear, few tokens": (64, 1024, 2048)}
QUICK_LAYERS = {"linear": (128, 256, 512)}
EXPERTS = (64, 2, 256, 512, 256)  # experts, active ones a token, tokens, d, hidden
QUICK_EXPERTS = (8, 2, 128, 128, 64)


class Loop(nn.Module):
    """The experts of fp4ext.Experts as a loop over torch's products."""

    def __init__(self, experts: fp4ext.Experts):
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x, offsets):
        out, start = [], 0
        for e, end in enumerate(offsets.tolist()):
            gate, up = nn.functional.linear(x[start:end], self.gate_up_proj[e]).chunk(2, dim=-1)
            out.append(nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[e]))
            start = end
        return torch.cat(out)


def forward_backward(module: nn.Module, *inputs: torch.Tensor, autocast: bool = True):
    """A function that runs it once, gradients of the input and of the parameters included."""
    x = inputs[0].requires_grad_()

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(*inputs)
        torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))

    return run


def layers(policies: list[str], shapes: dict):
    """(title, its cases) of each dense layer."""
    for name, (tokens, k, n) in shapes.items():
        x = torch.randn(tokens, k)
        cases = {"torch bf16": forward_backward(nn.Linear(k, n), x.clone())}
        cases["torch fp32"] = forward_backward(nn.Linear(k, n), x.clone(), autocast=False)
        for policy in policies:
            if policy != "bf16":
                cases[policy] = forward_backward(fp4ext.Linear(k, n, policy=policy), x.clone())
        yield f"{name}, {tokens}×{n}×{k}", cases


def experts(policies: list[str], experts: int, active: int, tokens: int, d: int, hidden: int):
    """(title, its cases) of a layer of experts; which tokens go where is drawn once."""
    counts = torch.randint(experts, (tokens * active,)).bincount(minlength=experts)
    offsets, x = counts.cumsum(0).to(torch.int32), torch.randn(tokens * active, d)
    module = lambda policy: fp4ext.Experts(experts, d, hidden, policy=policy)  # noqa: E731
    cases = {"torch bf16": forward_backward(Loop(module("bf16")), x.clone(), offsets)}
    cases["torch fp32"] = forward_backward(Loop(module("bf16")), x.clone(), offsets, autocast=False)
    cases |= {policy: forward_backward(module(policy), x.clone(), offsets) for policy in policies}
    yield f"{experts} experts, {active} active of {tokens} tokens, d {d}, hidden {hidden}", cases


def steps(policies: list[str], preset: str):
    """(title, its cases) of a training step."""
    p = presets.get(preset)
    tokens = torch.randint(p.shape.vocab, (p.batch, p.shape.context))
    cases = {}
    for policy in ["bf16", *(name for name in policies if name != "bf16")]:
        arm = Arm(policy, p, 0, torch.device("cpu"))
        cases[policy] = lambda arm=arm: arm.step(tokens, tokens, 0)
    yield f"training step, preset {preset}", cases


def main() -> None:
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="small shapes, for a look")
    p.add_argument("--policies", default="bf16,mxfp8,nvidia,end_to_end", help="(default: %(default)s)")
    p.set_defaults(repeats=3)  # a call takes up to some seconds
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    policies = [fp4ext.policies.get(name).name for name in args.policies.split(",")]

    rows, cells = [], []
    for title, cases in (
        *layers(policies, QUICK_LAYERS if args.quick else LAYERS),
        *experts(policies, *(QUICK_EXPERTS if args.quick else EXPERTS)),
        *steps(policies, "tiny" if args.quick else "small"),
    ):
        times = best_times(cases, args.repeats)
        base = next(iter(times.values()))
        for policy, seconds in times.items():
            row = {"what": title, "policy": policy, "seconds": seconds, "time_over_bf16": seconds / base}
            over_fp32 = seconds / times["torch fp32"] if "torch fp32" in times else None
            rows.append(row | {"time_over_fp32": over_fp32})
            ratios = f"{seconds / base:.2f}", "–" if over_fp32 is None else f"{over_fp32:.2f}"
            cells.append([f"{title}: {policy}", f"{seconds * 1e3:.1f}", *ratios])
    columns = ["what", "ms", "time / bf16 (first of its kind)", "time / torch fp32"]
    text = show("Forward and backward, quantization included", columns, cells)
    print("rows:", write_rows("linear", rows))
    if args.docs:
        print("docs:", publish("linear", [text]))


if __name__ == "__main__":
    main()
