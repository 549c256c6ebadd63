"""The command `pretrain`."""

from __future__ import annotations

from functools import partial

from .arguments import count, names, rate, seed
from .resumable import Job, add_where, carried_out

PRETRAIN = """\
Train one small transformer over bytes under several policies, side by side: the same initial weights, the same batches.
Ends with a table (validation loss, gap to bf16, bits stored, time) and a report.html in the run directory.
"""

PRETRAIN_EXAMPLES = """\
examples:
  python -m fp4ext pretrain
      the tiny preset on the source of Python's standard library, in runs/<date>
  python -m fp4ext pretrain --policies bf16,nvidia --steps 1000 --out runs/long
      two policies, more steps
  python -m fp4ext pretrain --data ~/notes book.txt --preset small
      your own text: folders are searched for text files, files are taken as they are
  python -m fp4ext pretrain --preset moe-tiny --policies bf16,nvidia,end_to_end
      a mixture of experts
  python -m fp4ext pretrain --model inkling2-tiny --policies bf16,end_to_end
      a model of transformers, converted: pip install 'fp4ext[transformers]'
  python -m fp4ext pretrain --resume runs/long
      go on after Ctrl-C, a crash or a full disk, bit for bit as if it had never stopped

policies: {policies}
"""


def add_pretrain(p) -> None:
    from ..train.pretraining import arm
    from ..train.runs import presets

    p.description, p.epilog = PRETRAIN, PRETRAIN_EXAMPLES.format(policies=", ".join(arm.policy_names()))
    # No default here: what was not given is None, so that --resume can tell it from what was.
    p.add_argument("--policies", metavar="A,B,…", type=names, help="the arms, comma-separated; names or files")
    p.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        help="files or folders of text (default: the Python standard library's source)",
    )
    ours = [name for name, preset in presets.PRESETS.items() if preset.model == "transformer"]
    theirs = [name for name in presets.PRESETS if name not in ours]
    model = p.add_mutually_exclusive_group()
    model.add_argument("--preset", metavar="NAME", help=f"model and schedule: {', '.join(ours)} (default: tiny)")
    model.add_argument(
        "--model",
        metavar="NAME",
        dest="preset",
        help=f"instead, transformers' own model, small: {', '.join(theirs)} (about 3M parameters)",
    )
    p.add_argument("--steps", metavar="N", type=count, help="training steps (default: the preset's)")
    p.add_argument("--batch", metavar="N", type=count, help="sequences a step (default: the preset's)")
    p.add_argument("--lr", metavar="X", type=rate, help="learning rate after the warm-up (default: the preset's)")
    p.add_argument(
        "--warmup", metavar="N", type=count, help="steps of warm-up, a fifth of the run at most (default: the preset's)"
    )
    p.add_argument("--seed", metavar="S", type=seed, help="of weights, batches and rounding (default: 0)")
    p.add_argument("--eval-every", metavar="N", type=count, help="steps between evaluations (default: the preset's)")
    p.add_argument("--save-every", metavar="N", type=count, help="steps between checkpoints (default: the preset's)")
    p.add_argument("--stats", metavar="N", type=count, help="watch the quantizers every N steps (default: don't)")
    p.add_argument("--threads", metavar="N", type=count, help="CPU threads (default: torch's choice)")
    p.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cpu)")
    add_where(p)


def run_pretrain(args) -> int:
    """The `pretrain` command."""
    from .. import train
    from ..train.pretraining.config import ADJUSTABLE
    from ..train.pretraining.view import VIEW
    from ..train.runs import display, presets

    job = Job.of(args, partial(display.Bars, VIEW), partial(display.Lines, VIEW))

    def work():
        if args.resume:
            return train.resume(job.out, show=job.show, asked=job.given)
        changes = {name: job.given[name] for name in ADJUSTABLE if name in job.given}
        preset = presets.get(args.preset or "tiny").with_(**changes)
        own = ("policies", "data", "seed", "threads", "device", "stats")
        options = {name: job.given[name] for name in own if name in job.given}
        return train.pretrain(train.Config(preset, **options), job.out, show=job.show)

    return carried_out(work, job, lambda result: display.final_table(VIEW, result, job.console))
