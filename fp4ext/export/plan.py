"""What becomes of each weight, decided from names, shapes, dtypes and formats alone, before a byte of data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..policy import formats
from ..policy.spec import Spec
from . import naming
from .choose import Chosen
from .errors import Invalid
from .layout import Layout
from .source import Source

Filter = Callable[[str, tuple[int, ...]], bool]


class Plan:
    """What becomes of each weight of a source in a layout.

    Attributes:
        names: all weights, layers in their order.
        specs: the plain weights that will be quantized → how.
        left: the others of two and more dimensions → why they stay plain.

    Raises:
        Refused: a weight that the layout cannot hold; nothing that would be quantized.
    """

    def __init__(self, src: Source, layout: Layout, chosen: Chosen, filter: Filter | None, requantize: bool):
        self.src, self.layout, self.chosen, self.filter, self.requantize = src, layout, chosen, filter, requantize
        self.names = sorted(src.names(), key=naming.natural)
        self.specs: dict[str, Spec] = {}
        self.left: dict[str, str] = {}
        for name in self.names:
            fmt = self.src.format(name)
            if fmt is not None:
                self._plan_stored(name, fmt)
                continue
            spec = chosen.specs.get(name)
            if spec is None:
                if name in chosen.left:
                    self.left[name] = chosen.left[name]
                continue
            if why := self._why_plain(name, spec):
                self.left[name] = why
                continue
            reason = self.layout.why_not(self.target_name(name), spec.fmt)
            if reason is not None:
                raise Invalid(f"{name!r}: {reason}; accepted: a policy whose weights the layout holds, or a filter")
            if spec.group == "row" and self.layout.name != "fp4ext":
                raise Invalid(f"{name!r}: {self.layout.name} has one outer scale a matrix, not one a row")
            self.specs[name] = spec
        if not self.specs and not any(map(self.src.format, self.names)) and not self.src.fp8:
            raise Invalid(f"no weight would be quantized: {self.left or 'there are no matrices'}")

    @property
    def bytes(self) -> int:
        """Of the checkpoint to be, about: what its tensors take, and their names."""
        return sum(map(self._bytes, self.names)) + 512 * len(self.names)

    def _bytes(self, name: str) -> int:
        spec, shape = self.specs.get(name), self.src.shape(name)
        if spec is not None:
            k = shape[-2] if naming.is_stack(name, shape) and self.src.transposed else shape[-1]
            return int(torch.Size(shape).numel() / k * spec.fmt.padded(k) * spec.fmt.bits_per_element / 8)
        if self.src.format(name) and self.layout.experts_only and not self.is_expert(name, shape):
            return 2 * torch.Size(shape).numel()  # it becomes BF16
        return self.src.nbytes(name)

    def _plan_stored(self, name: str, fmt: formats.Format) -> None:
        shape = self.src.shape(name)
        if self.layout.experts_only and not self.is_expert(name, shape):
            return
        reason = self.layout.why_not(self.target_name(name), fmt)
        if reason is not None and not self.requantize:
            raise Invalid(f"{name!r}: {reason}; accepted: another layout, or requantize")

    def is_expert(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a weight is one of a layer's experts, or a stack of them, of known parts."""
        return bool(naming.is_stack(name, shape) and naming.STACK.match(name)) or bool(naming.SEPARATE.match(name))

    def target_name(self, name: str) -> str:
        """A name of the kind that the layout will use for the weight."""
        match = naming.STACK.match(name)
        return f"{match['experts']}.0.down_proj.weight" if match and not self.layout.stacked else name

    def _why_plain(self, name: str, spec: Spec) -> str | None:
        """Why a weight that was chosen stays plain in this layout, None where it need not."""
        shape = self.src.shape(name)
        stack = naming.is_stack(name, shape)
        if stack and not naming.STACK.match(name) and self.layout.name != "fp4ext":
            return "a stack of experts of unknown parts"
        if self.layout.experts_only and not self.is_expert(name, shape):
            return f"{self.layout.name} quantizes experts alone"
        k = shape[-2] if stack and self.src.transposed else shape[-1]
        if k % spec.fmt.block and self.layout.name != "fp4ext":
            return f"K = {k} is not whole blocks of {spec.fmt.block}"
        if self.filter is not None and not self.filter(name, shape):
            return "the filter refused it"
        return None

    def units(self) -> Iterator[list[str]]:
        """Weights that must be seen together: those that share an outer scale, those that become one stack."""
        done: set[str] = set()
        names = set(self.names)
        for name in self.names:
            if name in done:
                continue
            unit = [name]
            separate = self.layout.experts_only and naming.SEPARATE.match(name)
            if separate and (name in self.specs or self.src.format(name)):
                experts, _, part = naming.of_expert(name)
                wanted = {"down_proj"} if part == "down_proj" else {"gate_proj", "up_proj"}
                unit = [other for other in self.names if self._of_experts(other, experts, wanted)]
                odd = next((n for n in unit if self._kind(n) != self._kind(name)), None)
                if odd is not None and not (self.requantize and all(map(self.src.format, unit))):
                    what = f"{odd!r} and {name!r} would be in one stack, and are not quantized alike"
                    raise Invalid(f"{what}; accepted: a policy and a filter that treat a layer's experts alike")
            elif (kind := self._shares(name)) is not None:
                unit = [n for n in naming.together(name, names) if self._shares(n) == kind]
            done.update(unit)
            yield unit

    def _shares(self, name: str) -> Spec | formats.Format | None:
        """What a weight must have in common with others to share an outer scale with them; None where it never does."""
        spec = self.specs.get(name)
        if spec is not None:
            return spec if spec.group == "tensor" else None
        fmt = self.src.format(name)
        return fmt if fmt is formats.NVFP4 and self.src.model is not None and self.layout.name != "fp4ext" else None

    def is_shared(self, name: str) -> bool:
        """Whether a weight shares an outer scale with others of its unit."""
        return self._shares(name) is not None

    def _kind(self, name: str) -> Spec | formats.Format | None:
        """How a weight is, or will be, quantized."""
        return self.specs.get(name) or self.src.format(name)

    @staticmethod
    def _of_experts(name: str, experts: str, parts: set[str]) -> bool:
        if not naming.SEPARATE.match(name):
            return False
        owner, _, part = naming.of_expert(name)
        return owner == experts and part in parts
