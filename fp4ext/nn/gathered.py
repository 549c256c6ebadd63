"""A whole weight that came as codes: what a layer's `weight` is between a gather of FSDP2 and the next free.

It is one parameter, with a gradient, whose values are those of a QTensor. The layer multiplies the codes themselves;
any other function sees the dequantized values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import Refused
from ..functional.qtensor import QTensor
from ..policy.spec import Spec

aten = torch.ops.aten


class GatheredWeight(Tensor):
    """[N, K], the values of a QTensor, in its dtype.

    Attributes:
        q: the QTensor. spec: how it was quantized.
    """

    q: QTensor
    spec: Spec

    @staticmethod
    def __new__(cls, q: QTensor, spec: Spec) -> GatheredWeight:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=q.dtype, device=q.device)

    def __init__(self, q: QTensor, spec: Spec):
        self.q, self.spec = q, spec

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.as_strided.default, aten.view.default, aten.alias.default):
            weight = args[0]
            if func in (aten.detach.default, aten.alias.default) or tuple(args[1]) == tuple(weight.shape):
                return GatheredWeight(weight.q, weight.spec)
        args, kwargs = tree_map_only(GatheredWeight, lambda t: t.q.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch declares an argument that it never passes
        return f"GatheredWeight({self.spec}, {self.q})"

    def check(self, spec: Spec | None) -> None:
        """Raises Refused where a layer wants its weight quantized by another spec, or whole."""
        if spec != self.spec:
            raise Refused(
                f"the weight was gathered as {self.spec}, and this stage wants {spec or 'it unquantized'}; accepted "
                "with gather_quantized: stages that quantize weights alike"
            )
