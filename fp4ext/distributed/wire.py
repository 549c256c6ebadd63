"""Four bits on the wire: FSDP2 gathers the quantized weights of converted layers instead of the weights.

    fp4ext.convert(model, "end_to_end")
    fp4ext.distributed.gather_quantized(model)     # before fully_shard
    for block in model.blocks: fully_shard(block)
    fully_shard(model)

Each rank quantizes its shard to the bytes that the whole weight would have, and FSDP2 gathers codes and scales: 4.5
bits per element for NVFP4, where BF16 takes 16. Master weights, gradients, optimizer states and
checkpoints stay as they are. The layer keeps nothing of a weight from its forward to its backward, which reads the
codes that FSDP2 gathers again.

The outer scale of a weight needs its amax over all ranks. That is one reduction for all weights together, when one of
them is gathered for the first time after they have changed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from ..errors import Refused
from ..functional import ops
from ..functional.qtensor import QTensor
from ..functional.quantization import quantize
from ..nn.dense import Linear
from ..nn.gathered import GatheredWeight
from ..policy.spec import Spec
from ..policy.stages import stage_of

aten = torch.ops.aten


def gather_quantized(model: nn.Module) -> dict[str, str]:
    """Prepare a converted model for fully_shard, so that its weights travel in 4 bits.

    Args:
        model: converted, its weights whole, on the device that they will be trained on or on "meta".

    Returns:
        The converted layers whose weights will be gathered as they are, name → why.

    Raises:
        Refused: no layer of the model is converted, or its weights are sharded already.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and m.policy.name != "bf16"}
    if not layers:
        raise Refused("the model has no converted linear layer; accepted: a model that fp4ext.convert made")
    for name, layer in layers.items():
        if hasattr(layer.weight, "device_mesh"):
            raise Refused(
                f"the weight of {name} is sharded; accepted: a call before fully_shard and parallelize_module"
            )
    amaxes, left = _Amaxes(), {}
    for name, layer in layers.items():
        if why := _why_not(layer):
            left[name] = why
            continue
        spec = layer.recipes["pretrain"].fprop.w
        weight = WireWeight(layer.weight.detach(), spec, amaxes)
        layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    return left


def _why_not(layer: Linear) -> str | None:
    """Why a layer's weight can't be gathered as codes, None where it can."""
    recipe, (rows, columns) = layer.recipes["pretrain"], layer.weight.shape
    spec = recipe.fprop.w
    if spec is None:
        return "its forward does not quantize the weight"
    if spec.needs_rng:
        return "its weight is rounded at random, and its rotation is the whole weight's"
    if layer.policy.bf16_forward_from is not None:
        return "its forward goes back to BF16 during training"
    others = [r.fprop.w for r in layer.recipes.values() if r.fprop.w is not None]
    if any(_layout(other) != _layout(spec) for other in others):
        return "its stages quantize the weight to different formats or outer scales"
    if not (recipe.dgrad.w is None or recipe.dgrad.from_fprop):
        if spec.block != "16x16" or recipe.dgrad.w != spec:
            return f"its dgrad quantizes the unrounded weight ({recipe.dgrad.w})"
        if rows % 16 or columns % 16:
            return "its weight is not made of whole 16×16 tiles"
    return None


def _layout(spec: Spec) -> tuple[str, bool, bool]:
    """What the sizes of codes and scales hang on, and the weight's amax."""
    return spec.format, spec.group == "row", spec.needs_rng


def _stage(module: nn.Module) -> str:
    """The stage of the forward, also when its backward gathers again."""
    in_backward = torch._C._current_graph_task_id() != -1
    return module.__dict__.get("_last_stage", "pretrain") if in_backward else stage_of(module)


class _Amaxes:
    """The amaxes of all weights of a model, reduced together when one of them is out of date."""

    def __init__(self) -> None:
        self._weights: list[weakref.ref[WireWeight]] = []
        self._stale = True

    def add(self, weight: WireWeight) -> None:
        """Reduce its amax with the others' from now on."""
        self._weights.append(weakref.ref(weight))

    def changed(self) -> None:
        """Some weight has other values now."""
        self._stale = True

    def of(self, weight: WireWeight, mesh: DeviceMesh) -> Tensor:
        """The amax of the whole weight of which this is a shard."""
        if self._stale:
            for other in self._alive():
                other.amax = None
            self._stale = False
        if weight.amax is None:
            self._reduce(mesh)
        return weight.amax

    def _alive(self) -> list[WireWeight]:
        return [w for w in (ref() for ref in self._weights) if w is not None]

    def _reduce(self, mesh: DeviceMesh) -> None:
        weights = [w for w in self._alive() if w.mesh == mesh]
        own = torch.stack([w.own_amax() for w in weights])
        group = mesh.get_group().group_name
        own = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(own, "max", group))
        for weight, amax in zip(weights, own.unbind(), strict=True):
            weight.amax = amax


# What FSDP2 and the optimizers do to a shard and its copies; the result of any other function is a plain tensor.
_STAYS = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.split.Tensor,
    aten.clone.default,
    aten.detach.default,
}


class WireWeight(Tensor):
    """A weight, or a shard of one, that FSDP2 gathers as codes and scales. Else it acts as the plain tensor it holds.

    Attributes:
        whole: the plain tensor [rows, K], or this rank's shard of its rows.
        spec: how it is quantized.
    """

    whole: Tensor
    spec: Spec

    @staticmethod
    def __new__(cls, whole: Tensor, spec: Spec, amaxes: _Amaxes) -> WireWeight:
        return Tensor._make_wrapper_subclass(
            cls, whole.shape, whole.stride(), whole.storage_offset(), dtype=whole.dtype, device=whole.device
        )

    def __init__(self, whole: Tensor, spec: Spec, amaxes: _Amaxes):
        self.whole, self.spec, self.amaxes = whole, spec, amaxes
        self.mesh: DeviceMesh | None = None
        self.amax: Tensor | None = None
        self.dtype_on_wire = whole.dtype

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        like = next(a for a in _flat(args, kwargs) if isinstance(a, WireWeight))
        if func._schema.is_mutable:
            like.amaxes.changed()
        args, kwargs = tree_map_only(WireWeight, lambda t: t.whole, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in _STAYS:
            return out
        return tree_map_only(Tensor, lambda t: _like(like, t), out)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole"], (self.spec, self.amaxes)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], kept: Any, size: Any, stride: Any) -> WireWeight:
        return WireWeight(inner["whole"], *kept)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole.__reduce_ex__(protocol)  # on disk it is a plain tensor

    def __repr__(self) -> str:
        return f"WireWeight({self.spec}, {self.whole})"

    def values(self) -> Tensor:
        """The shard in the dtype that a gather of the plain weight would have."""
        return self.whole.to(self.dtype_on_wire)

    def own_amax(self) -> Tensor:
        """That of this shard; 0 where it has no rows."""
        if not self.whole.numel():
            return self.whole.new_zeros((), dtype=torch.float32)
        return ops.amax(self.values(), self.spec.key).view(())

    def quantized(self, mesh: DeviceMesh, spec: Spec) -> QTensor:
        """This shard's rows of the quantized whole."""
        if spec.group == "row" or not spec.fmt.has_global_scale:
            return quantize(self.values(), spec, role="w")
        return quantize(self.values(), spec, role="w", amax=self.amaxes.of(self, mesh))

    def _spec(self, module: nn.Module) -> Spec:
        """How the layer's stage quantizes the weight; the layer itself refuses a stage that does not."""
        if not hasattr(module, "recipes"):
            raise Refused(
                f"the weight is gathered as {self.spec}, and its {type(module).__name__} is plain now; accepted: a "
                "layer that stays converted"
            )
        return module.recipes[_stage(module)].fprop.w or self.spec

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What each rank sends."""
        _check_even(outer_size, mesh, self.spec)
        if self.mesh is None:  # the first gather: from now on this is a shard, which is reduced with its kind
            self.mesh, self.dtype_on_wire = mesh, mp_policy.param_dtype or self.dtype
            self.amaxes.add(self)
        spec = self._spec(module)
        q = self.quantized(mesh, spec)
        parts = [q.codes.view(torch.uint8), q.scales.view(torch.uint8)]
        if q.global_scale is not None:
            rows = self.shape[0] if q.global_scale.dim() else 1
            parts.insert(0, q.global_scale.reshape(rows, 1).contiguous().view(torch.uint8))
        shapes = [t.shape for t in parts]
        if mesh.size() == 1:  # FSDP2 of torch 2.13 takes one tensor from a rank that is alone
            parts = [torch.cat([t.flatten() for t in parts])]
        return tuple(parts), (outer_size, spec, shapes)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        kept: Any,
        param_dtype: torch.dtype,
        *,
        out: GatheredWeight | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, on the very memory that FSDP2 gathers into, and frees and fills again."""
        outer_size, spec, shapes = kept
        if out is not None:  # a view of that memory
            out.spec = spec
            return None
        parts = gathered
        if len(parts) == 1:
            flat = gathered[0].split([shape.numel() for shape in shapes])
            parts = tuple(t.view(shape) for t, shape in zip(flat, shapes, strict=True))
        *outer, codes, scales = parts
        scale = None
        if outer:
            scale = outer[0].view(torch.float32)
            scale = scale if spec.group == "row" else scale[0, 0]
        fmt = spec.fmt
        q = (codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), scale, fmt, outer_size, param_dtype)
        return GatheredWeight(QTensor(*q), spec), gathered


def _check_even(size: torch.Size, mesh: DeviceMesh, spec: Spec) -> None:
    unit = mesh.size() * (16 if spec.block == "16x16" else 1)
    if size[0] % unit:
        raise Refused(f"a weight has {size[0]} rows, over {mesh.size()} ranks; accepted here: a multiple of {unit}")


def _like(weight: WireWeight, t: Tensor) -> WireWeight:
    return WireWeight(t, weight.spec, weight.amaxes)


def _flat(*trees: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(trees)
