"""The commands `audit`, `cost` and `explain`: they parse, print and write files; the work is in fp4ext.audit."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import contextmanager
from pathlib import Path

from ..errors import Refused
from .arguments import count, number, numbers, share

FEW_DRAWS = 32  # docs/audit.md

AUDIT = """\
Measure a model layer by layer and operand by operand: error, bias and noise (told apart by averaging), underflow,
saturation, outliers; name what is wrong; and propose a policy, every line of it with its reason.
"""

AUDIT_EXAMPLES = """\
examples:
  python -m fp4ext audit runs/demo/pretrain
      the run's model and policies; writes report.html, report.json and advice.toml to runs/demo/pretrain/audit
  python -m fp4ext audit runs/demo/pretrain --policies nvidia,end_to_end --goal bias --machine gb300
      other policies; time priced on a described machine
  python -m fp4ext audit models/llama --data book.txt
      a model folder of transformers (config.json and safetensors)
  python -m fp4ext pretrain --policies bf16,runs/demo/pretrain/audit/advice.toml
      what to do with the advice
"""

COST_EXAMPLES = """\
examples:
  python -m fp4ext cost --model config.json --tokens 10T --machine gb300 --gpus 4096
      time, arithmetic intensity and memory of a run, and which term binds
  python -m fp4ext cost --model runs/demo/pretrain --policy nvidia --machine h200
  python -m fp4ext cost --model config.json --stage rl_sampler --batch 256
      decoding, 256 sequences side by side on one chip
"""

EXPLAIN_EXAMPLES = """\
examples:
  python -m fp4ext explain 3.2 --grid 3,4
      what rounding does once, and a thousand times
  python -m fp4ext explain 3.2
      the same on E2M1, the grid of 4 bits
  python -m fp4ext explain 0.1,0.4,3.2,5.9 --spec nvfp4/sweep
      a block: its scale, its codes, its error under several rules
"""


def add_audit(p) -> None:
    from ..audit.advice import GOALS

    p.description, p.epilog = AUDIT, AUDIT_EXAMPLES
    p.add_argument(
        "model", metavar="RUN|FOLDER", help="a run of pretrain or end-to-end, or a model folder of transformers"
    )
    p.add_argument("--policies", metavar="A,B,…", help="names or files (default: the run's; else nvidia,end_to_end)")
    p.add_argument("--goal", choices=GOALS, default="error", help="what the advice decides by (default: error)")
    p.add_argument("--budget", metavar="X%", type=share, default=0.01, help="relative loss allowed (default: 1%%)")
    p.add_argument("--machine", metavar="NAME", default="here", help="what time is priced on (default: here, measured)")
    p.add_argument("--arm", metavar="NAME", help="whose weights of a run (default: bf16's)")
    p.add_argument(
        "--task", metavar="FILE.py", help="the task that the run learned, where that is a file, which is run"
    )
    p.add_argument("--data", metavar="FILE", help="text for a model folder (default: Python's standard library)")
    p.add_argument("--batches", metavar="N", type=count, default=2, help="to measure on (default: 2)")
    p.add_argument("--draws", metavar="N", type=count, default=FEW_DRAWS, help="of what is random (default: 32)")
    p.add_argument("--tokens", metavar="N", type=count, default=512, help="measured of each layer (default: 512)")
    p.add_argument("--threads", metavar="N", type=count, help="CPU threads (default: the run's)")
    p.add_argument("--out", metavar="DIR", help="where the report goes (default: RUN/audit, or audit-<date>)")


def run_audit(args) -> int:
    """The `audit` command."""
    import torch
    from rich.console import Console

    from .. import audit
    from ..audit import advice, html, text
    from ..policy import policies
    from ..train.load import of_pretraining

    console, folder = Console(), Path(args.model)
    model, batches, own, facts = _model(folder, args)
    torch.set_num_threads(args.threads or facts.get("threads") or torch.get_num_threads())
    if args.draws < FEW_DRAWS:
        console.print(
            f"--draws {args.draws}: fewer than {FEW_DRAWS} may name drifts that are not there", style="yellow"
        )
    named = [policies.get(name.strip()) for name in args.policies.split(",")] if args.policies else own
    machine = _machine(args.machine, console)
    is_run = (of_pretraining(folder) / "checkpoints").is_dir()
    out = Path(args.out) if args.out else folder / "audit" if is_run else _dated("audit")
    with _written_to(out):
        out.mkdir(parents=True, exist_ok=True)
    with _progress(console) as progress:
        report = audit.measure(model, batches, named, draws=args.draws, tokens=args.tokens, progress=progress)
        report.facts |= facts
        proposal = advice.advise(
            model,
            batches,
            args.goal,
            machine=machine,
            budget=args.budget,
            draws=min(args.draws, 12),
            tokens=args.tokens,
            progress=progress,
        )
    words = ["python -m fp4ext audit", shlex.quote(args.model), f"--goal {args.goal}", f"--machine {args.machine}"]
    words += [f"--policies {args.policies}"] if args.policies else []
    page = html.render(report, f"Audit of {folder.name}", " ".join(words), proposal)
    with _written_to(out):
        (out / "report.html").write_text(page)
        (out / "report.json").write_text(json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n")
        (out / "advice.toml").write_text(proposal.text())
        (out / "advice.json").write_text(proposal.text("json"))
    text.print_report(report, console)
    text.print_advice(proposal, console)
    console.print(f"report: {out / 'report.html'}\nadvice: {out / 'advice.toml'}", highlight=False, soft_wrap=True)
    return 0


@contextmanager
def _written_to(out: Path):
    """What is done to the report's folder, or one line why not."""
    try:
        yield
    except OSError as error:
        raise Refused(f"--out {out}: cannot be written ({error.strerror}); accepted: a directory to write to") from None


def add_cost(p) -> None:
    from ..audit import machines
    from ..policy.stages import STAGES

    p.epilog = COST_EXAMPLES
    p.add_argument("--model", metavar="CONFIG", required=True, help="a config.json, a folder with one, or a run")
    p.add_argument("--policy", metavar="NAME", default="end_to_end", help="a name or a file (default: end_to_end)")
    p.add_argument("--tokens", metavar="N", type=number, help="of the whole run, such as 10T or 300B")
    p.add_argument(
        "--machine", metavar="NAME", default="gb300", help=f"{', '.join(machines.MACHINES)} (default: gb300)"
    )
    p.add_argument("--gpus", metavar="N", type=count, default=1, help="that share the model (default: 1)")
    p.add_argument("--batch", metavar="N", type=number, help="tokens a step on all chips (default: 8192 a chip)")
    p.add_argument("--stage", choices=STAGES, default="pretrain", help="(default: pretrain)")
    p.add_argument("--efficiency", metavar="X%", type=share, default=0.7, help="of data sheets (default: 70%%)")


def run_cost(args) -> int:
    """The `cost` command."""
    from rich.console import Console

    from ..audit import machines, text
    from ..audit.cost_model import Shape, cost

    shape, machine = Shape.read(args.model), machines.get(args.machine)
    batch = int(args.batch) if args.batch else None
    found = cost(shape, args.policy, machine, args.gpus, batch, args.stage, args.efficiency)
    console = Console()
    text.print_cost(found, console, args.tokens)
    said = f"{machine.note}; {args.efficiency:.0%} of the figures assumed, not measured"
    console.print(said, style="dim", highlight=False)
    return 0


def add_explain(p) -> None:
    p.epilog = EXPLAIN_EXAMPLES
    p.add_argument("values", metavar="X[,Y,…]", type=numbers, help="a number, or the numbers of a block")
    p.add_argument("--grid", metavar="A,B,…", type=numbers, help="rising numbers (default: E2M1, 0 to 6)")
    p.add_argument("--spec", metavar="KEY", help="quantize the numbers as a block, e.g. nvfp4/sweep")
    p.add_argument("--draws", metavar="N", type=count, default=1000, help="of stochastic rounding (default: 1000)")
    p.add_argument("--seed", metavar="S", type=int, default=0, help="(default: 0)")


def run_explain(args) -> int:
    """The `explain` command."""
    from rich.console import Console

    from ..audit import explain
    from ..policy.spec import Spec

    console = Console(highlight=False)
    if args.spec and args.grid:
        raise Refused("--grid beside --spec; accepted: one of them")
    if args.spec or len(args.values) > 1 and not args.grid:
        rules = [Spec.parse(args.spec)] if args.spec else []
        rules += [Spec.parse(k) for k in ("nvfp4/amax", "nvfp4/sweep", "nvfp4/amax/stochastic", "mxfp8")]
        for spec in dict.fromkeys(rules):
            b = explain.block(list(args.values), spec, args.seed)
            images = "  ".join(f"{v:.4g}" for v in b.images)
            console.print(f"{spec.key}\n  scale {b.scale:.5g}; becomes {images}; relative error {b.error:.2e}")
        return 0
    for value in args.values:
        r = explain.rounded(value, args.grid or explain.E2M1_GRID, args.draws, args.seed)
        console.print(f"[bold]{value:g}[/] between {r.low:g} and {r.high:g}")
        console.print(
            f"  nearest     {r.nearest:g}, always: off by {r.nearest - value:+.4g}, and so is any average of it"
        )
        highs, lows = r.draws
        console.print(f"  stochastic  {r.high:g} with probability {r.up:.3g}, else {r.low:g}")
        for name, n in ((r.high, highs), (r.low, lows)):
            console.print(f"              {name:>6g} {'█' * round(40 * n / args.draws)} {n}")
        off = r.mean - value
        console.print(
            f"              mean of {args.draws}: {r.mean:.4f}, off by {off:+.4f} (typically ±{r.expected_error:.4f})"
        )
        for n in (1, 10, 100, 1000, 10000):
            if n <= args.draws:
                mean = explain.running_means(r, n, args.seed)[-1]
                console.print(f"                after {n:>5}: {mean:.4f}")
    return 0


def _model(folder: Path, args):
    """(model, batches, policies, facts) of a run or of a model folder."""
    from ..audit import hf
    from ..policy import policies

    if hf.is_model(folder):
        from ..train import data

        corpus = data.load([args.data] if args.data else ())
        model, batches = hf.load(folder, corpus.train[: 1 << 20].tobytes(), args.batches)
        return model, batches, [policies.get("nvidia"), policies.get("end_to_end")], {"text": corpus.source}
    from ..train.load import load

    loaded = load(folder, args.batches, args.arm, args.task)
    facts = {"weights": f"of the arm {loaded.arm}, after step {loaded.step}"}
    facts["threads"] = loaded.config.threads
    if loaded.amax_by_step:
        facts["amax_by_step"] = loaded.amax_by_step
    return loaded.model, loaded.batches, loaded.policies or [policies.get("end_to_end")], facts


def _machine(name: str, console):
    from ..audit import advice, machines
    from ..audit.calibrate import calibrate

    if name != "here":
        return machines.get(name)
    console.print("timing this machine", style="dim")
    return calibrate(advice.needed())[0]


def _progress(console):
    """A context that gives progress(what, done, of): a bar on a terminal, a line every ten seconds elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
    def bars():
        columns = BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=1)
            yield lambda what, done, of: progress.update(task, description=what, completed=done, total=of)

    @contextmanager
    def lines():
        last = time.monotonic()

        def say(what: str, done: int, of: int) -> None:
            nonlocal last
            if time.monotonic() - last > 10:
                last = time.monotonic()
                console.print(f"{done}/{of} {what}", highlight=False)

        yield say

    return bars() if console.is_terminal else lines()


def _dated(name: str) -> Path:
    return Path(time.strftime(f"{name}-%Y%m%d-%H%M%S"))
