"""save: a model, a checkpoint or weights in; a checkpoint in one of the layouts out.

One layer at a time is read, quantized and written; a shard is all that waits in memory. First everything is planned
from names, shapes and dtypes, and refused if it must be; then bytes are read; the target appears at the very end.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..functional import ops
from ..functional.qtensor import QTensor
from ..functional.quantization import quantize
from ..policy.formats import Format
from ..policy.policy import Policy
from ..policy.spec import Spec
from . import arrange, layouts, module, naming, recorded
from .against import against
from .checkpoint import AnyWeight, Checkpoint
from .choose import choose
from .errors import Invalid, shown
from .fp8 import Fp8
from .layout import Layout, Pieces, Written
from .plan import Filter, Plan
from .progress import Bar
from .source import Source, source_of
from .stored import Stored, check_scales
from .writer import SHARD, Writer, check_room, check_target


@dataclass
class Report:
    """What save did.

    Attributes:
        layout, folder: what was written, and where.
        quantized: weight name in the new checkpoint → its format.
        left: weight that could have been quantized, or nearly → why it is plain. 1-D tensors are not listed.
        lost: weight → what the new layout could not keep. Empty: every bit that decodes is there.
        clipped: weight → elements that no longer fit the stored scales (with `like`).
        decided_by: what said which weights are quantized: the model itself, its class in transformers, or names alone.
        warnings: what a reader of the checkpoint should know.
        aside: file or folder of the source that was not copied along → why.
        bytes: of the new checkpoint's tensors. was: of the source's.
    """

    layout: str
    folder: Path
    quantized: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)
    decided_by: str = ""
    warnings: list[str] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    was: int = 0

    def __str__(self) -> str:
        counts = {fmt: list(self.quantized.values()).count(fmt) for fmt in sorted(set(self.quantized.values()))}
        what = ", ".join(f"{n} in {fmt}" for fmt, n in counts.items()) or "none quantized"
        lines = [f"{self.folder} ({self.layout}): {what}; {self.was:,} bytes → {self.bytes:,}"]
        lines += [f"  decided by {self.decided_by}"] if self.decided_by else []
        lines += [f"  warning: {warning}" for warning in self.warnings]
        lines += [f"  {len(names)} left plain: {why}" for why, names in self._by(self.left)]
        lines += [
            f"  {len(names)} not exactly as before: {what} ({names[0]}, …)" for what, names in self._by(self.lost)
        ]
        if self.clipped:
            n = sum(self.clipped.values())
            lines.append(f"  {n} elements in {len(self.clipped)} weights were clipped: they outgrew the stored scales")
        lines += [f"  not copied: {', '.join(names)} ({why})" for why, names in self._by(self.aside)]
        return "\n".join(shown(line) for line in lines)

    @staticmethod
    def _by(named: dict[str, str]) -> list[tuple[str, list[str]]]:
        reasons: dict[str, list[str]] = {}
        for name, why in named.items():
            reasons.setdefault(why, []).append(name)
        return list(reasons.items())


def save(
    source: nn.Module | str | Path | Checkpoint | Mapping[str, Tensor | QTensor],
    folder: str | Path,
    layout: str | Layout = "compressed-tensors",
    *,
    policy: Policy | Spec | Format | str | None = None,
    filter: Filter | None = None,
    like: str | Path | Checkpoint | None = None,
    input_amax: Mapping[str, float] | None = None,
    requantize: bool = False,
    config: Mapping | None = None,
    shard: int = SHARD,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Report:
    """Write a checkpoint.

    Args:
        source: a module; the path of a checkpoint (a folder or a .safetensors file), plain or in any layout; a
            Checkpoint; or a mapping of names to Tensors and QTensors. What is quantized already is kept as it is.
        folder: a new or empty folder.
        layout: "compressed-tensors", "modelopt", "gpt-oss", "inkling", "inkling2" or "fp4ext".
        policy: whose sampler's weights are written: a Policy or its name; or for all alike a Spec, its key
            ("nvfp4/sweep") or a Format. Default: a converted module's own; else "end_to_end", in a layout that holds
            MXFP4 alone "mxfp4".
        filter: called with the name and shape of each matrix that would be quantized; False leaves it plain.
        like: a checkpoint in the same layout, whose scales are kept: weights that did not change keep their bytes.
        input_amax: module name → the largest input that calibration saw, for layouts that store it.
        requantize: let weights change their format where the layout cannot hold the one they have.
        config: the model's config.json; default: the source's own, of a module its class's name.
        shard: bytes of a shard, about.
        overwrite: replace a checkpoint that is there.
        progress: show a bar on stderr; default: on a terminal.

    Returns:
        A Report of what was quantized, what was left, and what the layout could not keep.

    Raises:
        Refused: a source or a request that cannot be used, or a disk without room; nothing is written. OSError: the
            disk gave out; the target is as it was.
    """
    layout, folder = layouts.get(layout), Path(folder)
    check_target(folder, overwrite)
    like = Checkpoint(like) if isinstance(like, (str, Path)) else like
    if like is not None and like.layout.name != layout.name:
        raise Invalid(f"like is in layout {like.layout.name}; accepted: {layout.name}, the layout to write")
    with ExitStack() as scratch:
        src = module.of_model(source, scratch) if isinstance(source, nn.Module) else source_of(source)
        src.config = src.config if config is None else dict(config)
        chosen = choose(src, policy, layout)
        plan = Plan(src, layout, chosen, filter, requantize)
        check_room(folder, plan.bytes)
        report = Report(layout.name, folder, left=plan.left, was=sum(map(src.nbytes, plan.names)))
        report.decided_by = chosen.by if plan.specs else ""
        job = _Job(src, layout, plan, like, input_amax or {}, report)
        with Bar(report.was, progress) as bar, Writer(folder, shard, overwrite) as writer:
            job.run(writer, bar)
    if chosen.policy is not None and plan.specs:
        report.warnings += chosen.policy.row_variance_warnings()
    for warning in report.warnings:
        warnings.warn(warning, stacklevel=2)
    return report


@dataclass
class _Job:
    src: Source
    layout: Layout
    plan: Plan
    like: Checkpoint | None
    input_amax: Mapping[str, float]
    report: Report

    def run(self, writer: Writer, bar: Bar) -> None:
        """Read, quantize and write, a layer's worth at a time."""
        written = Written(kv_cache=self.src.kv_cache)
        if self.src.kv_cache is not None and not self.layout.says_kv_cache:
            self.report.lost["kv_cache_scheme"] = f"a config of {self.layout.name} says nothing of the KV cache"
        for names in self.plan.units():
            for name, weight in self._encoded(names):
                self._write(writer, written, name, weight)
                del weight
            bar.advance(sum(map(self.src.nbytes, names)), names[-1])
        told = {naming.module(name) for name in (*written.plain, *written.formats, *written.fp8)}
        written.plain += [f"{name}.weight" for name in self.plan.chosen.linear if name not in told]
        writer.files |= self.layout.describe(self.src.config, written)
        writer.files |= recorded.decision(self.plan.chosen, self.plan.left)
        self._warn(written)
        writer.copies += [path for path in self.src.side_files if path.name not in writer.files]
        self.report.bytes = writer.bytes
        self.report.aside |= self.src.aside

    def _encoded(self, names: list[str]) -> Iterator[tuple[str, AnyWeight]]:
        """The new checkpoint's weights that come of these."""
        spec = self.plan.specs.get(names[0])
        pieces = self._arranged({name: self._load(name, spec) for name in names})
        if spec is None or not any(isinstance(w, Tensor) for _, w in pieces):
            yield from self._under_one_outer(pieces) if len(names) > 1 and self.plan.is_shared(names[0]) else pieces
            return
        joint = spec.group == "tensor" and (not spec.pow2 or names[0] in self.plan.chosen.stacked)
        shared = self._shared_amax(pieces, spec) if joint else {}
        made = [
            (name, self._quantized(name, w, spec, shared.get(name)) if isinstance(w, Tensor) else w)
            for name, w in pieces
        ]
        yield from self._under_one_outer(made) if spec.group == "tensor" and not joint and self.like is None else made

    def _under_one_outer(self, pieces: Sequence[tuple[str, AnyWeight]]) -> Sequence[tuple[str, AnyWeight]]:
        """Weights of NVFP4 that a fused reader takes for one, under one outer scale; others as they are."""
        nvfp4 = {name: w for name, w in pieces if isinstance(w, Stored) and w.outer is not None}
        if not len(pieces) == len(nvfp4) > 1:
            return pieces
        made, rounded = arrange.under_one_outer(nvfp4)
        for name, n in rounded.items():
            self.report.lost[name] = f"{n} block scales are rounded, under an outer scale that it shares with others"
        return list(made.items())

    def _load(self, name: str, spec: Spec | None) -> AnyWeight:
        weight = self.src.weight(name)
        if isinstance(weight, Fp8):
            return weight
        if isinstance(weight, Tensor):
            stack = naming.is_stack(name, tuple(weight.shape))
            return weight.mT if spec is not None and stack and self.src.transposed else weight
        fits = self.layout.why_not(self.plan.target_name(name), weight.q.format) is None
        whole = weight.q.shape[-1] % weight.q.format.block == 0 and weight.per_matrix
        if self.layout.experts_only and not self.plan.is_expert(name, tuple(weight.q.shape)):
            plain = weight.q.dequantize(torch.bfloat16)
            if not torch.equal(plain.float(), weight.q.dequantize(torch.float32)):
                self.report.lost[name] = "rounded to BF16: the layout quantizes experts alone"
            return plain
        if fits and (whole or self.layout.name == "fp4ext"):
            return weight.without_zero_scales() if self.src.model is not None and weight.per_matrix else weight
        if not self.plan.requantize:
            raise Invalid(f"{name!r}: {weight.q} does not fit into {self.layout.name}; accepted: fp4ext, or requantize")
        made = self._anew(name, weight.q.dequantize(torch.float32))
        self.report.lost[name] = f"quantized anew, {weight.q.format} → {made.q.format}"
        return replace(made, input_amax=weight.input_amax)

    def _anew(self, name: str, values: Tensor) -> Stored:
        """Values quantized by the policy's spec, or where the layout cannot hold that by the layout's own."""
        target = self.plan.chosen.spec_of(name)
        if target is None or self.layout.why_not(self.plan.target_name(name), target.fmt):
            target = Spec(self.layout.formats[0].name)
        self.report.lost[name] = f"quantized anew, into {target.fmt}"
        return self._quantized(name, values, target, None)

    def _arranged(self, weights: dict[str, AnyWeight]) -> Sequence[tuple[str, AnyWeight]]:
        """The weights of a unit under the names and in the arrangement of the layout."""
        name = next(iter(weights))
        weight_of = {n: w for n, w in weights.items() if not isinstance(w, Fp8)}
        if len(weight_of) < len(weights):  # FP8 weights stay as they are
            return list(weights.items())
        packed = name in self.plan.specs or isinstance(weights[name], Stored)
        separate = naming.SEPARATE.match(name)
        if packed and separate and self.layout.experts_only:
            parts: dict[str, dict[int, arrange.Weight]] = {}
            for n in weights:
                _, e, part = naming.of_expert(n)
                parts.setdefault(part, {})[e] = weight_of[n]
            anew = self._anew if self.plan.requantize else None
            return [arrange.stack(separate["experts"], parts, self.layout, anew)]
        if packed and naming.STACK.match(name) and arrange.is_stack(weight_of[name]):
            alternating = self.src.alternating or naming.of_stack(name)[1] in naming.ALTERNATING
            if self.layout.experts_only:
                return [arrange.restack(name, weight_of[name], alternating, self.layout)]
            if not self.layout.stacked:
                return arrange.unstack(name, weight_of[name], alternating)
            if alternating:
                return [arrange.as_named(name, weight_of[name])]
        return list(weights.items())

    def _shared_amax(self, pieces: Sequence[tuple[str, AnyWeight]], spec: Spec) -> dict[str, Tensor]:
        """The amax of each group of matrices that a fused reader takes for one."""
        plain = {name: w for name, w in pieces if isinstance(w, Tensor) and w.dim() == 2}
        own = {name: ops.amax(w, spec.key) for name, w in plain.items()}
        groups = {name: naming.together(name, own) for name in own}
        return {name: torch.stack([own[n] for n in group]).amax(0) for name, group in groups.items() if len(group) > 1}

    def _quantized(self, name: str, x: Tensor, spec: Spec, amax: Tensor | None) -> Stored:
        if self.like is not None and name in self.like and self.like.format(name) is not None:
            old = self.like.weight(name)
            if isinstance(old, Stored) and old.q.format is spec.fmt and tuple(old.q.shape) == tuple(x.shape):
                if not bool(x.isfinite().all()):
                    raise Invalid(f"{name!r} holds NaN or infinity; accepted: finite weights")
                made, clipped = against(x, old)
                if clipped:
                    self.report.clipped[name] = clipped
                return made
        if x.dim() == 3:
            return arrange.pile_packed(
                [self._quantized(f"{name} expert {e}", x[e], spec.of_one_expert(), None) for e in range(x.shape[0])]
            )
        q = quantize(x, spec, role="w", amax=amax)
        check_finite(name, q)
        made = Stored.of(q)
        return made.without_zero_scales() if made.per_matrix else made

    def _warn(self, written: Written) -> None:
        """What a reader of this checkpoint gets wrong."""
        experts = {fmt: name for name, fmt in sorted(written.formats.items()) if naming.SEPARATE.match(name)}
        wrong = {
            "nvfp4": "drops their weight_global_scale and computes with wrong weights, without a word",
            "mxfp8": "cannot open them",
        }
        for fmt, name in experts.items() if self.layout.name == "compressed-tensors" else ():
            if fmt in wrong:
                self.report.warnings.append(
                    f"experts in {fmt} ({name}, …): transformers (seen in 5.24) {wrong[fmt]}. fp4ext.export.load reads "
                    "them right; a reader in transformers needs the whole model in mxfp4"
                )

    def _write(self, writer: Writer, written: Written, name: str, weight: AnyWeight) -> None:
        if isinstance(weight, Tensor):
            if weight.dim() >= 2:
                written.plain.append(name)
            writer.add(name, weight)
            return
        if isinstance(weight, Fp8):
            self._write_pieces(writer, name, self.layout.write_fp8(name, weight))
            written.fp8[name] = replace(weight, codes=weight.codes.to("meta"))
            self.report.quantized[name] = weight.kind
            self.report.left.pop(name, None)
            return
        amax = self.input_amax.get(naming.module(name))
        if amax is not None:
            weight = replace(weight, input_amax=torch.tensor(float(amax)))
        if weight.input_amax is not None:
            written.with_inputs.add(name)
        self._write_pieces(writer, name, self.layout.write(name, weight))
        written.formats[name] = self.report.quantized[name] = weight.q.format.name

    def _write_pieces(self, writer: Writer, name: str, pieces: Pieces) -> None:
        writer.say(pieces.metadata)
        for tensor, value in pieces.tensors.items():
            writer.add(tensor, value)
        if pieces.lost:
            before = self.report.lost.get(name)
            self.report.lost[name] = pieces.lost if before is None else f"{before}; {pieces.lost}"


def check_finite(name: str, q: QTensor) -> None:
    """Raises Refused where what was quantized held a NaN or an infinity: its block's scale says so."""
    try:
        check_scales(repr(name), q.format, q.scales)
    except Invalid:
        raise Invalid(f"{name!r} holds NaN or infinity; accepted: finite weights") from None
