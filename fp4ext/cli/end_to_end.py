"""The command `end-to-end`."""

from __future__ import annotations

from .arguments import count, names, rate, seed
from .resumable import Job, add_where, carried_out

END_TO_END = """\
The four stages in one command: pretrain a model in 4 bits beside BF16, reinforce it in 4 bits, write it as a 4-bit
checkpoint, and read that back: the same greedy tokens? Ends with a table of the stages and a report.html.
"""

EXAMPLES = """\
examples:
  python -m fp4ext end-to-end
      a mixture of experts learns to add, in runs/<date>
  python -m fp4ext end-to-end --preset task --layout compressed-tensors --task examples/reverse_task.py
      a dense model, another layout, a task of your own
  python -m fp4ext end-to-end --model inkling2-tiny
      transformers' own model, up to a checkpoint in its release's layout that transformers loads
  python -m fp4ext end-to-end --resume runs/whole
      go on after Ctrl-C or a crash, in whatever stage, bit for bit as if it had never stopped

the run directory: pretrain/ and rl/ are runs of those commands; checkpoint/ is what `export` writes; report.html
"""


def add_end_to_end(p) -> None:
    from ..train.runs import presets

    p.description, p.epilog = END_TO_END, EXAMPLES
    ours = [name for name, preset in presets.PRESETS.items() if preset.model == "transformer"]
    theirs = [name for name in presets.PRESETS if name not in ours]
    model = p.add_mutually_exclusive_group()
    model.add_argument("--preset", metavar="NAME", help=f"model and schedule: {', '.join(ours)} (default: moe-task)")
    model.add_argument(
        "--model", metavar="NAME", dest="preset", help=f"instead, transformers' own model, small: {', '.join(theirs)}"
    )
    p.add_argument("--task", metavar="NAME", help="arithmetic, or FILE.py (default: arithmetic)")
    p.add_argument("--policies", metavar="A,B,…", type=names, help="names or files (default: bf16,nvidia,end_to_end)")
    p.add_argument("--policy", metavar="NAME", help="the one that goes on, and its 4 bits (default: end_to_end)")
    p.add_argument("--arms", metavar="A,B,…", type=names, help="of RL; the first goes on (default: matched,mismatched)")
    p.add_argument("--steps", metavar="N", type=count, help="of pretraining (default: the preset's)")
    p.add_argument("--rl-steps", metavar="N", type=count, help="of RL (default: 100)")
    p.add_argument("--lr", metavar="X", type=rate, help="learning rate of RL (default: 5e-4)")
    p.add_argument("--prompts", metavar="N", type=count, help="of a step of RL (default: 32)")
    p.add_argument("--group", metavar="N", type=count, help="completions of each prompt (default: 8)")
    p.add_argument("--layout", metavar="NAME", help="of the checkpoint (default: fp4ext, or the model's release's)")
    p.add_argument("--seed", metavar="S", type=seed, help="of everything (default: 0)")
    p.add_argument("--threads", metavar="N", type=count, help="CPU threads (default: torch's choice)")
    add_where(p)


def run_end_to_end(args) -> int:
    """The `end-to-end` command."""
    from ..train import end_to_end
    from ..train.end_to_end import display

    job = Job.of(args, display.Bars, display.Lines)

    def work():
        if not args.resume:
            return end_to_end.end_to_end(end_to_end.Config(**job.given), job.out, job.show)
        job.nothing_beside_resume(but="task")
        return end_to_end.resume(job.out, job.show, task_file=args.task)

    return carried_out(work, job, lambda result: display.final_table(result, job.console))
