"""Cost: what a step takes, in time, bytes and memory, and which term binds.

A term is an operation on the critical path. Its time is the larger of its arithmetic and its traffic,

    seconds = max(operations / rate, bytes / bandwidth),

with the rates and the bandwidth of a data sheet times an efficiency, and the step is the sum of the terms, or the time
to exchange weights and gradients, if that is larger (they overlap). Quantizers live on the vector lanes; products on
the tensor cores, at the rate of their widest operand. What is not a converted layer is BF16.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ..conversion import described
from ..conversion.decision import by_names_alone, decide
from ..conversion.names import named_modules
from ..errors import Refused
from ..nn.transformers_experts import is_stacked, names_of_stacks, stack_of
from ..policy import policies
from ..policy.policy import Policy
from ..policy.spec import Spec
from ..policy.stages import check_stage
from .calibrate import Here
from .machines import Machine
from .operations import Op, arithmetic, bits, moved, of_layer

EFFICIENCY = 0.7  # of a data sheet's figures: an assumption, for a described machine was not measured


@dataclass(frozen=True)
class Matrix:
    """A kind of linear layer: w [n, k], one in each of `count` blocks, by the name that a policy sees.

    Attributes:
        experts: how many such matrices a block has. chosen: how many of them a token meets.
    """

    name: str
    n: int
    k: int
    count: int
    experts: int = 1
    chosen: int = 1

    def spread(self, tokens: int) -> tuple[int, int]:
        """(matrices of a block that some token meets, tokens of each), spread evenly."""
        met = min(self.experts, tokens * self.chosen)
        return met, -(-tokens * self.chosen // met)


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer, as the cost model sees it.

    Attributes:
        name: what a person calls it.
        layers, d, heads, kv_heads, head_dim, ffn, context, vocab: its sizes; `ffn` is the inner width of SwiGLU.
        experts, top_k, expert_ffn: of a mixture in every block: how many experts, how many of them a token meets, and
            their inner width; `ffn` is then that of the expert that all tokens share, 0 where there is none.
        attending: how many layers attend; 0: all. kv_width: what such a layer keeps of a token, elements; 0: keys and
            values of kv_heads.
        model: the model itself, on the meta device, whose layers and parameters then count instead of these sizes.
    """

    name: str
    layers: int
    d: int
    heads: int
    ffn: int
    context: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    attending: int = 0
    kv_width: int = 0
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def matrices(self) -> list[Matrix]:
        """The linear layers of all blocks. Without a model q, k, v share one matrix, and gate and up another."""
        if self.model is not None:
            return list(_matrices(self.model, self.top_k))
        dim = self.head_dim or self.d // self.heads
        q, kv = self.heads * dim, (self.kv_heads or self.heads) * dim
        sizes = [("attention.qkv", q + 2 * kv, self.d), ("attention.out", self.d, q)]
        if self.ffn:
            mlp = "mlp.shared" if self.experts else "mlp"
            sizes += [(f"{mlp}.gate_up", 2 * self.ffn, self.d), (f"{mlp}.down", self.d, self.ffn)]
        made = [Matrix(name, n, k, self.layers) for name, n, k in sizes]
        if self.experts:
            stacks = ((2 * self.expert_ffn, self.d), (self.d, self.expert_ffn))
            made += [Matrix("mlp.experts", n, k, self.layers, self.experts, self.top_k) for n, k in stacks]
        return made

    @property
    def linear_parameters(self) -> int:
        return sum(m.n * m.k * m.count * m.experts for m in self.matrices)

    @property
    def parameters(self) -> int:
        """Embedding and head counted, apart, without a model; routers too."""
        if self.model is not None:
            return sum(p.numel() for p in self.model.parameters())
        rest = 2 * self.vocab + 2 * self.layers + 1 + self.layers * self.experts
        return self.linear_parameters + rest * self.d

    @classmethod
    def read(cls, source: str | Path) -> Shape:
        """The shape in a config.json (of transformers or of a run), or in a folder that holds one.

        Where transformers is installed and makes a causal model of the config, that model is counted, built on the meta
        device.

        Raises:
            Refused: it cannot be read, or lacks a size; the message says which.
        """
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise Refused(f"{source}: cannot be read ({error}); accepted: a config.json with a model's sizes") from None
        model = described.causal(config)
        if model is not None:
            return cls._of(model, config.get("_name_or_path") or config["model_type"])
        config = config.get("text_config", config)
        if isinstance(config.get("run"), dict):  # a run of fp4ext
            config = config["run"]["preset"]["shape"] | {"name": config["run"]["preset"]["name"]}
        name = config.get("name") or config.get("_name_or_path") or config.get("model_type") or path.stem
        keys = KEYS | (_keys_of_a_mixture(config) if _first(config, EXPERTS) else {})
        found = {"name": str(name)}
        for field_, names in keys.items():
            value, least = _first(config, names), 0 if field_ == "ffn" and "experts" in keys else 1
            value = least if value is None and least == 0 else value
            if value is None and field_ in ("kv_heads", "head_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise Refused(f"{file}: {' or '.join(names)} is {value!r}; accepted: a whole number from {least}")
            found[field_] = value
        return cls(**found)

    @classmethod
    def _of(cls, model: nn.Module, name: str) -> Shape:
        """That of a model of transformers."""
        config = model.config
        get = lambda *names: next((v for n in names if isinstance(v := getattr(config, n, None), int)), 0)  # noqa: E731
        kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
        layers, heads = get("num_hidden_layers") or len(kinds), get("num_attention_heads")
        latent = get("kv_lora_rank")
        dim = get("qk_head_dim") if latent else get("head_dim") or (get("hidden_size") // heads if heads else 0)
        attends = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
        attending = len(attends) if kinds else layers * bool(heads)
        return cls(
            name=name,
            layers=layers,
            d=get("hidden_size"),
            heads=heads or 1,
            ffn=get("intermediate_size", "ffn_dim", "n_inner"),
            context=get("max_position_embeddings", "n_positions") or 8192,
            vocab=config.vocab_size,
            kv_heads=get("num_key_value_heads"),
            head_dim=dim,
            experts=get(*EXPERTS),
            top_k=get("num_experts_per_tok", "top_k_experts", "moe_k"),
            expert_ffn=get("moe_intermediate_size"),
            attending=attending or (0 if not kinds and heads else -1),
            kv_width=latent + get("qk_rope_head_dim") if latent else 0,
            model=model,
        )


def _matrices(model: nn.Module, top_k: int) -> Iterator[Matrix]:
    """The linear layers of a model, by their names, but for its head; stacks of experts with how many a token meets."""
    head = model.get_output_embeddings()
    for name, module in named_modules(model):
        if isinstance(module, nn.Linear) and module is not head:
            yield Matrix(name, *module.weight.shape, 1)
        elif is_stacked(module):
            for stack in names_of_stacks(module):
                experts, n, k = stack_of(module, stack).shape
                yield Matrix(name, n, k, 1, experts, min(experts, top_k or experts))


def _first(config: dict, names: Iterable[str]):
    """The value of the first of some names that a config has."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _keys_of_a_mixture(config: dict) -> dict[str, tuple[str, ...]]:
    """Where a config says the widths of experts: some call it intermediate_size, others have a dense width there."""
    apart = _first(config, ("expert_ffn", "moe_intermediate_size")) is not None
    shared = ("ffn", "shared_expert_intermediate_size") if apart else ()
    width = ("expert_ffn", "moe_intermediate_size") if apart else ("intermediate_size",)
    return {"experts": EXPERTS, "top_k": ("top_k", "num_experts_per_tok"), "expert_ffn": width, "ffn": shared}


EXPERTS = ("experts", "num_experts", "num_local_experts", "n_routed_experts")
KEYS = {
    "layers": ("layers", "num_hidden_layers", "n_layer"),
    "d": ("d", "hidden_size", "n_embd"),
    "heads": ("heads", "num_attention_heads", "n_head"),
    "ffn": ("ffn", "intermediate_size", "n_inner"),
    "context": ("context", "max_position_embeddings", "n_positions"),
    "vocab": ("vocab", "vocab_size"),
    "kv_heads": ("kv_heads", "num_key_value_heads"),
    "head_dim": ("head_dim",),
}


@dataclass(frozen=True)
class Term:
    """A part of a step.

    Attributes:
        name: what it is, e.g. "dgrad".
        seconds: what it takes.
        operations, bytes: what it does and moves.
        binds: "tensor cores", "vector lanes", "memory" or "link"; "measured" on this machine.
    """

    name: str
    seconds: float
    operations: float
    bytes: float
    binds: str

    def times(self, n: int) -> Term:
        """n such parts."""
        return Term(self.name, n * self.seconds, n * self.operations, n * self.bytes, self.binds)


@dataclass
class Cost:
    """A step of one chip, and the whole run.

    Attributes:
        terms: the parts of a step, in order; `exchange` overlaps them.
        seconds: of a step. tokens: of a step on all chips.
        memory: what each chip holds, by what it is, bytes.
    """

    shape: Shape
    policy: str
    machine: str
    gpus: int
    tokens: int
    terms: list[Term]
    exchange: Term | None
    memory: dict[str, float] = field(default_factory=dict)
    room: float = 0.0

    @property
    def seconds(self) -> float:
        return max(sum(t.seconds for t in self.terms), self.exchange.seconds if self.exchange else 0.0)

    @property
    def binds(self) -> Term:
        """The longest part, or the exchange where nothing hides it."""
        longest = max(self.terms, key=lambda t: t.seconds)
        busy = sum(t.seconds for t in self.terms)
        return self.exchange if self.exchange and self.exchange.seconds > busy else longest

    @property
    def intensity(self) -> float:
        """Arithmetic intensity of a step: operations a byte of memory traffic."""
        return sum(t.operations for t in self.terms) / max(1.0, sum(t.bytes for t in self.terms))

    @property
    def overhead(self) -> float:
        """The share of a step that quantizers take."""
        return sum(t.seconds for t in self.terms if t.name.startswith("quantize")) / self.seconds

    def run_seconds(self, tokens: float) -> float:
        """The time of a run over that many tokens."""
        return tokens / self.tokens * self.seconds


def seconds(op: Op, machine: Machine | Here, efficiency: float = EFFICIENCY) -> Term:
    """One operation on a machine."""
    if isinstance(machine, Here):
        return Term(op.kind, machine.seconds(op), _operations(op), moved(op), "measured")
    arithmetic_rate = machine.rate(*op.keys[:2]) if op.kind == "gemm" else machine.vector
    compute = _operations(op) / (arithmetic_rate * efficiency)
    memory = moved(op) / (machine.bandwidth * efficiency)
    binds = "memory" if memory > compute else "tensor cores" if op.kind == "gemm" else "vector lanes"
    return Term(op.kind, max(compute, memory), _operations(op), moved(op), binds)


def layer_seconds(ops: Iterable[Op], machine: Machine | Here, efficiency: float = EFFICIENCY) -> float:
    """The time of a layer's operations, one after the other."""
    own = machine.layer if isinstance(machine, Here) else 0.0
    return own + sum(seconds(op, machine, efficiency).seconds for op in ops)


def cost(
    shape: Shape,
    policy: Policy | str,
    machine: Machine,
    gpus: int = 1,
    batch_tokens: int | None = None,
    stage: str = "pretrain",
    efficiency: float = EFFICIENCY,
) -> Cost:
    """The cost of a step of a model under a policy, sharded over all chips (weights, moments, gradients).

    Args:
        machine: one that is described (machines.get).
        batch_tokens: tokens of a step on all chips; default: 8192 a chip. For "rl_sampler": sequences that decode side
            by side on one chip, a token each; default 64.
        stage: "pretrain" and "rl_trainer" train; "rl_sampler" decodes, on weights that are quantized once.
        efficiency: the share of the machine's figures that is reached.

    Raises:
        Refused: an unknown stage or policy, gpus or batch_tokens under 1, an efficiency outside (0, 1].
    """
    policy = policies.get(policy)
    check_stage(stage)
    decode = stage == "rl_sampler"
    batch_tokens = batch_tokens or (64 if decode else 8192 * gpus)
    if gpus < 1 or batch_tokens < gpus * (not decode):
        raise Refused(f"gpus is {gpus}, batch_tokens {batch_tokens}; accepted: at least 1, and a token a chip")
    if not 0 < efficiency <= 1:
        raise Refused(f"efficiency is {efficiency}; accepted: above 0, up to 1")
    t = batch_tokens if decode else batch_tokens // gpus
    sums: dict[str, list[Term]] = {}
    weights = saved = 0.0
    chosen = _chosen(shape, policy)
    for m in shape.matrices:
        for block in range(m.count):
            name = m.name if shape.model is not None else f"blocks.{block}.{m.name}"
            recipe = policy.recipe(stage, name) if name in chosen else policies.get("bf16").pretrain
            met, tokens = m.spread(t)
            for op in of_layer(recipe, tokens, m.n, m.k, backward=not decode, weights_ready=decode):
                name = op.gemm if op.kind == "gemm" else f"quantize, {op.gemm}"
                sums.setdefault(name, []).append(seconds(op, machine, efficiency).times(met))
            weights += m.experts * m.n * m.k * recipe.weight_bits / 8
            saved += t * m.chosen * m.k * recipe.saved_activation_bits / 8
    terms = [_sum(name, parts) for name, parts in sums.items()]
    terms += _rest(shape, t, machine, efficiency, decode)
    if decode:
        rest = shape.parameters - shape.linear_parameters
        memory = {"weights": weights + 2 * rest, "keys and values": t * _kv(shape) * shape.context}
        return Cost(shape, policy.name, machine.name, gpus, t * gpus, terms, None, memory, machine.memory)
    p, share = shape.parameters, shape.parameters / gpus
    terms.append(_memory("optimizer", 28 * share, machine, efficiency))  # w, m, v, g read; w, m, v written; fp32
    exchange = None
    if gpus > 1:
        sent = p * (2 + 2 + 2) * (gpus - 1) / gpus  # BF16 weights gathered twice, BF16 gradients scattered
        exchange = Term("exchange", sent / (machine.link * efficiency), 0.0, sent, "link")
    layer = max(m.experts * m.n * m.k for m in shape.matrices)
    memory = {
        "weights and moments, fp32": 12 * share,
        "gradients, fp32": 4 * share,
        "two gathered layers": 2 * (2 + 4.5 / 8) * layer,
        "saved for backward": saved + shape.layers * t * shape.d * 2 * 2,
        "logits, fp32": min(t, 8192) * shape.vocab * 4.0,
    }
    return Cost(shape, policy.name, machine.name, gpus, batch_tokens, terms, exchange, memory, machine.memory)


def _operations(op: Op) -> float:
    if op.kind == "gemm":
        return 2.0 * op.work
    key = {"quantize": 0, "requantize": 1}.get(op.kind)
    return op.work * (2.0 if key is None else arithmetic(Spec.parse(op.keys[key])))


def _chosen(shape: Shape, policy: Policy) -> set[str]:
    """The layers that a policy quantizes, as convert decides it."""
    if shape.model is not None:
        return set(decide(shape.model, policy).chosen)
    names = [f"blocks.{block}.{m.name}" for block in range(shape.layers) for m in shape.matrices]
    return set(by_names_alone(list(dict.fromkeys(names)), policy).chosen)


def _attending(shape: Shape) -> int:
    """How many layers attend."""
    return max(0, shape.attending) if shape.attending else shape.layers


def _kv(shape: Shape) -> float:
    """Bytes of keys and values a token, BF16."""
    dim = shape.head_dim or shape.d // shape.heads
    return 2.0 * _attending(shape) * (shape.kv_width or 2 * (shape.kv_heads or shape.heads) * dim)


def _sum(name: str, parts: list[Term]) -> Term:
    largest = max(parts, key=lambda t: t.seconds)
    total = (sum(getattr(t, what) for t in parts) for what in ("seconds", "operations", "bytes"))
    return Term(name, *total, largest.binds)


def _memory(name: str, traffic: float, machine: Machine, efficiency: float) -> Term:
    return Term(name, traffic / (machine.bandwidth * efficiency), 0.0, traffic, "memory")


def _rest(shape: Shape, t: int, machine: Machine, efficiency: float, decode: bool) -> list[Term]:
    """Attention, norms, SwiGLU, residuals and head: BF16, whatever the policy."""
    passes = 1 if decode else 3  # forward; and twice that for the backward
    dim = (shape.head_dim or shape.d // shape.heads) * shape.heads
    seen = shape.context if decode else shape.context / 2  # causal
    attention = passes * 4.0 * t * seen * dim * _attending(shape)
    traffic = t * seen * _kv(shape) if decode else passes * 2.0 * 4 * t * dim * _attending(shape)
    rate = machine.rate("bf16") * efficiency
    spent = max(attention / rate, traffic / (machine.bandwidth * efficiency))
    binds = "tensor cores" if attention / rate >= spent else "memory"
    head = passes * 2.0 * t * shape.d * shape.vocab
    head_bytes = passes * (shape.d * shape.vocab * 2.0 + t * shape.vocab * 2.0)
    head_spent = max(head / rate, head_bytes / (machine.bandwidth * efficiency))
    # An element of a residual: 2 norms read and write it, 2 sums read two and write one; SwiGLU reads 2 ffn, writes 1.
    pointwise = passes * shape.layers * t * (20.0 * shape.d + 6.0 * (shape.ffn + shape.top_k * shape.expert_ffn))
    return [
        Term("attention", spent, attention, traffic, binds),
        Term("head", head_spent, head, head_bytes, "tensor cores" if head / rate >= head_spent else "memory"),
        _memory("norms and SwiGLU", pointwise, machine, efficiency),
    ]


__all__ = ["Cost", "Matrix", "Shape", "Term", "bits", "cost", "layer_seconds", "seconds"]
