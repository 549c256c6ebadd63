"""Layers whose weights stay quantized: what a sampler holds in memory, and what adapters are trained on.

    y [.., N] = gemm(Q(x), ŵ) + bias        4.5 bits per weight in NVFP4, no copy in a wider type
    dx        = dy·ŵ                        in the dtype of x; Q counts as the identity (straight-through)

The weights are constants; the bias can be trained. The backward dequantizes a layer's weights for as long as it runs.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..errors import Refused
from ..functional.autograd import Context, first_derivative
from ..functional.grouped import grouped_quantize
from ..functional.qtensor import QTensor
from ..functional.quantization import check_input
from ..policy import policies
from ..policy.formats import Format
from ..policy.policy import Policy
from ..policy.spec import Spec, as_spec
from . import layer_ops
from .activation import swiglu
from .transformers_experts import Stacked, mixed, names_of_stacks, plain_class, stack_of


class QuantizedLinear(nn.Module):
    """y = x·ŵᵀ + bias, w a QTensor. Gradients flow to x and to a bias that requires one, never to the weight.

    Its codes and scales are buffers, so `.to(device)` and state_dict carry them; a dtype given to `.to` leaves them.

    Args:
        weight: [N, K], any format.
        bias: [N] or None.
        x: how the input is quantized: a Spec, its key or a Format; None leaves it as it is (weight-only).
        w: how the weight was, where that is known: what fp4ext.refit quantizes new weights by.

    Input [.., K] in fp32, bf16 or fp16; output [.., N] in the same dtype, or autocast's.

    Raises:
        ValueError: a weight that is no matrix, or a bias that does not fit. TypeError: a weight that is no QTensor.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: QTensor, bias: Tensor | None = None, x: Spec | None = None, w: Spec | None = None):
        super().__init__()
        if not isinstance(weight, QTensor):
            raise TypeError(f"weight is {type(weight).__name__}; accepted: a QTensor")
        if len(weight.shape) != 2:
            raise Refused(f"weight has shape {tuple(weight.shape)}; accepted: [N, K]")
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise Refused(f"bias has shape {tuple(bias.shape)}; accepted: ({weight.shape[0]},)")
        self.out_features, self.in_features = weight.shape
        self.format, self.weight_dtype, self.x, self.w = weight.format, weight.dtype, *_specs(x, w)
        _hold(self, "", weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def of(cls, weight: QTensor, bias: Tensor | None, policy: Policy | str, name: str = "") -> QuantizedLinear:
        """One that quantizes its input as the policy's sampler does, if into the weight's format; else weight-only."""
        x = policies.get(policy).recipe("rl_sampler", name).fprop.x
        return cls(weight, bias, x if x is not None and x.fmt is weight.format else None)

    @property
    def weight(self) -> QTensor:
        """The weight, over the buffers' memory."""
        shape = torch.Size((self.out_features, self.in_features))
        return _held(self, "", self.format, shape, self.weight_dtype)

    @property
    def weights(self) -> list[QTensor]:
        """The weight alone, as QuantizedExperts.weights has two."""
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        x = layer_ops.by_autocast(x)
        rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        y = _product(rows, self.x, self.weight, self.bias, None)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        bits = f"{self.weight.bits_per_element:.2f} bits per weight"
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format}, {bits}, x={self.x}"
        )


class QuantizedExperts(nn.Module):
    """SwiGLU experts with packed weights, as fp4ext.Experts in the sampler's stage. Gradients flow to x alone.

    Args:
        gate_up, down: stacks [E, 2F, K] (gate first) and [E, K, F], of one format each.
        x: how the input of each product is quantized: a Spec, its key or a Format; None leaves it as it is.
        w: how the stacks were, where that is known: what fp4ext.refit quantizes new weights by.

    Input: x [T, K] in fp32, bf16 or fp16, rows sorted by expert, and offsets int32 [E], the ends of the experts' rows.
    Output [T, K] in the same dtype, or autocast's; rows past the last offset are zero.

    Raises:
        ValueError: stacks that do not fit together. TypeError: a stack that is no QTensor.
    """

    def __init__(self, gate_up: QTensor, down: QTensor, x: Spec | None = None, w: Spec | None = None):
        super().__init__()
        for name, stack in (("gate_up", gate_up), ("down", down)):
            if not isinstance(stack, QTensor):
                raise TypeError(f"{name} is {type(stack).__name__}; accepted: a QTensor")
        shapes = tuple(gate_up.shape), tuple(down.shape)
        if len(shapes[0]) != 3 or shapes[1] != (shapes[0][0], shapes[0][2], shapes[0][1] // 2) or shapes[0][1] % 2:
            raise Refused(f"gate_up is {shapes[0]}, down {shapes[1]}; accepted: [E, 2F, K] and [E, K, F]")
        self.kinds = {"gate_up": (gate_up.format, gate_up.shape), "down": (down.format, down.shape)}
        self.weight_dtype, (self.x, self.w) = gate_up.dtype, _specs(x, w)
        _hold(self, "gate_up_", gate_up)
        _hold(self, "down_", down)

    @classmethod
    def of(cls, gate_up: QTensor, down: QTensor, policy: Policy | str, name: str = "") -> QuantizedExperts:
        """One that quantizes its inputs as the policy's sampler does, if into the weights' format; else weight-only."""
        x = policies.get(policy).recipe("rl_sampler", name).fprop.x
        same = x is not None and x.fmt is gate_up.format is down.format
        return cls(gate_up, down, x if same else None)

    @property
    def gate_up_proj(self) -> QTensor:
        """The stack [E, 2F, K], over the buffers' memory."""
        return _held(self, "gate_up_", *self.kinds["gate_up"], self.weight_dtype)

    @property
    def down_proj(self) -> QTensor:
        """The stack [E, K, F], likewise."""
        return _held(self, "down_", *self.kinds["down"], self.weight_dtype)

    @property
    def weights(self) -> list[QTensor]:
        """Both stacks."""
        return [self.gate_up_proj, self.down_proj]

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        x = layer_ops.by_autocast(x)
        h = swiglu(_product(x, self.x, self.gate_up_proj, None, offsets))
        return _product(h, self.x, self.down_proj, None, offsets)

    def extra_repr(self) -> str:
        experts, features, hidden = self.down_proj.shape
        bits = 8 * sum(w.nbytes for w in self.weights) / (3 * experts * features * hidden or 1)
        size = f"{experts}, features={features}, hidden={hidden}"
        return f"{size}, {self.kinds['gate_up'][0]}, {bits:.2f} bits per weight, x={self.x}"


class QuantizedStacked(Stacked):
    """What is mixed into a class of experts of transformers that hold their stacks packed: as Stacked in the sampler's
    stage. Gradients flow to x and to what the class itself holds, such as biases. `of` makes one.

    Attributes:
        x, w: as in QuantizedExperts.
        kinds: the format and shape of each stack, by its name. weight_dtype: the dtype that the stacks had.
    """

    x: Spec | None
    w: Spec | None
    kinds: dict[str, tuple[Format, torch.Size]]
    weight_dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, x: Spec | None, w: Spec) -> nn.Module:
        """Those of a converted or plain module, its biases, activation and norm copied."""
        packed = {name: grouped_quantize(stack_of(module, name), w, role="w") for name in names_of_stacks(module)}
        return cls.holding(module, packed, x, w)

    @classmethod
    def holding(cls, module: nn.Module, packed: dict[str, QTensor], x: Spec | None, w: Spec | None = None) -> nn.Module:
        """Those of a module, with stacks that are quantized already, [E, N, K] by name."""
        names = names_of_stacks(module)
        # deepcopy takes what is in the memo for a copy that it has made already: no stack is copied.
        made = copy.deepcopy(module, {id(module._parameters[name]): None for name in names})
        made.__class__ = mixed(cls, plain_class(module))
        assert isinstance(made, QuantizedStacked)
        made.kinds = {name: (q.format, q.shape) for name, q in packed.items()}
        made.weight_dtype, (made.x, made.w) = packed[names[0]].dtype, _specs(x, w)
        for name, q in packed.items():
            _hold(made, f"{name}_", q)
        return made

    def held(self, name: str) -> QTensor:
        """A stack [E, N, K], over the buffers' memory."""
        return _held(self, f"{name}_", *self.kinds[name], self.weight_dtype)

    @property
    def weights(self) -> list[QTensor]:
        """Both stacks."""
        return [self.held(name) for name in self.stacks]

    def product(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        return _product(layer_ops.by_autocast(x), self.x, self.held(name), None, offsets)

    def extra_repr(self) -> str:
        bits = 8 * sum(w.nbytes for w in self.weights) / sum(w.shape.numel() for w in self.weights)
        return f"{self.kinds['down_proj'][0]}, {bits:.2f} bits per weight, x={self.x}"


def _specs(*given: Spec | Format | str | None) -> list[Spec | None]:
    return [None if spec is None else as_spec(spec) for spec in given]


def _product(x: Tensor, spec: Spec | None, w: QTensor, bias: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Q(x)·ŵᵀ + bias in the dtype of x, with its backward. x [T, K], w [N, K]; or with offsets [E], w [E, N, K]."""
    check_input("x", x)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        y: Tensor = _Product.apply(x, spec, w, bias, offsets)  # type: ignore[no-untyped-call]
        return y
    rounded = layer_ops.operand(x, spec, "x", -1, offsets, None)
    return layer_ops.product(rounded, w, bias, offsets, x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, spec: Spec | None, w: QTensor, bias: Tensor | None, offsets: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(offsets, *w.tensors().values())
        ctx.w, ctx.dtypes = (w.format, w.shape, w.dtype), (x.dtype, None if bias is None else bias.dtype)
        with torch.no_grad():
            return _product(x, spec, w, bias, offsets)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        offsets, codes, scales, *outer = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        dx = db = None
        if ctx.needs_input_grad[0]:
            w = QTensor(codes, scales, *(outer or [None]), *ctx.w).dequantize(x_dtype)
            dx = layer_ops.product(dy.to(x_dtype).contiguous(), w.mT, None, offsets, x_dtype, own=True)
        if ctx.needs_input_grad[3]:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, None, None, db, None


def _hold(module: nn.Module, prefix: str, q: QTensor) -> None:
    """Keep a QTensor as buffers of whole numbers, so that Module.to(dtype) and half() find no float to convert."""
    module.register_buffer(f"{prefix}codes", q.codes.view(torch.uint8))
    module.register_buffer(f"{prefix}scales", q.scales.view(torch.uint8))
    outer = q.global_scale
    module.register_buffer(f"{prefix}global_scale", None if outer is None else outer.contiguous().view(torch.int32))


def _held(module: nn.Module, prefix: str, fmt: Format, shape: torch.Size, dtype: torch.dtype) -> QTensor:
    """The QTensor of those buffers."""
    codes, scales, outer = (getattr(module, f"{prefix}{part}") for part in ("codes", "scales", "global_scale"))
    outer = None if outer is None else outer.view(torch.float32)
    return QTensor(codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), outer, fmt, shape, dtype)
