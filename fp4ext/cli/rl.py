"""The command `rl`."""

from __future__ import annotations

from functools import partial

from .arguments import count, names, real, seed
from .resumable import Job, add_where, carried_out

RL = """\
Reinforce a pretrained model on a verifiable task with GRPO, under several arms side by side: the same start, the same
prompts. Ends with a table (reward before and after, how far trainer and sampler disagree, time) and a report.html.
"""

RL_EXAMPLES = """\
examples:
  python -m fp4ext rl
      pretrains a small model on the arithmetic task first, then reinforces it, in runs/<date>
  python -m fp4ext pretrain --preset task --data task:arithmetic --policies end_to_end --out runs/start
  python -m fp4ext rl --from runs/start --arms bf16,mismatched,tis,matched,amax,quantized_backward
      from a run of your own; all comparisons
  python -m fp4ext rl --task examples/reverse_task.py
      a task of your own: a class with text, prompt and reward
  python -m fp4ext rl --resume runs/rl
      go on after Ctrl-C or a crash, bit for bit as if it had never stopped

arms:
  matched             4-bit sampler; the trainer's forward is the same function, its backward BF16
  mismatched          4-bit sampler, BF16 trainer
  tis, rejection, icepop    the same, guarded by token TIS, sequence rejection, IcePop
  bf16                BF16 sampler and trainer
  amax                matched, but one outer scale for a whole tensor: it depends on the batch
  quantized_backward  matched, but the backward by the policy too: 4 bits; MXFP8 with --policy mxfp8_backward
"""


def add_rl(p) -> None:
    p.description, p.epilog = RL, RL_EXAMPLES
    p.add_argument("--from", metavar="RUN", dest="source", help="a pretraining run (default: make one first)")
    p.add_argument("--task", metavar="NAME", help="arithmetic, or FILE.py (default: what the run learned)")
    p.add_argument("--arms", metavar="A,B,…", type=names, help="comma-separated (default: bf16,mismatched,matched)")
    p.add_argument("--policy", metavar="NAME", help="whose 4 bits: a name or a file (default: end_to_end)")
    p.add_argument("--steps", metavar="N", type=count, help="updates of the policy (default: 100)")
    p.add_argument("--prompts", metavar="N", type=count, help="prompts a step (default: 32)")
    p.add_argument("--group", metavar="N", type=count, help="completions of each prompt (default: 8)")
    p.add_argument("--updates", metavar="N", type=count, help="minibatches a step (default: 2)")
    p.add_argument("--lr", metavar="X", type=real, help="learning rate (default: 5e-4)")
    p.add_argument("--clip", metavar="X", type=real, help="how far a token's ratio counts (default: 0.2)")
    p.add_argument("--kl-coef", metavar="X", type=real, help="weight of the KL to the start (default: 0)")
    p.add_argument("--level", metavar="NAME", help="the loss is a mean over: token or sequence (default: token)")
    p.add_argument("--temperature", metavar="X", type=real, help="of sampling (default: 1)")
    p.add_argument("--kv-cache", metavar="NAME", help="bf16, mxfp8, nvfp4: for both sides (default: bf16)")
    p.add_argument("--seed", metavar="S", type=seed, help="of prompts and random streams (default: 0)")
    p.add_argument("--slots", metavar="N", type=count, help="sequences sampled at a time (default: 96)")
    p.add_argument("--save-every", metavar="N", type=count, help="steps between checkpoints (default: 10)")
    p.add_argument("--threads", metavar="N", type=count, help="CPU threads (default: torch's choice)")
    add_where(p)


def run_rl(args) -> int:
    """The `rl` command."""
    from ..train import rl
    from ..train.rl.view import VIEW
    from ..train.runs import display

    job = Job.of(args, partial(display.Bars, VIEW), partial(display.Lines, VIEW))

    def work():
        if not args.resume:
            return rl.reinforce(rl.Config(**job.given), job.out, show=job.show)
        job.nothing_beside_resume(but="task")
        return rl.resume(job.out, show=job.show, task_file=args.task)

    return carried_out(work, job, lambda result: display.final_table(VIEW, result, job.console))
