"""The stage that modules run in: pretrain, rl_sampler or rl_trainer. A stage belongs to a thread, as autocast does.

    with fp4ext.stage("rl_trainer"):
        loss = f(model)
    loss.backward()

A recomputation (torch.utils.checkpoint) happens later, in the backward, perhaps on one of autograd's threads, and needs
the stage of its forward. So the tensors that autograd saves inside `with stage(…)` carry the stage's name
(torch.autograd.graph.saved_tensors_hooks). Both kinds of checkpoint (reentrant or not) save their inputs there and
unpack them just before they recompute. At that moment the thread returns to that stage, until the backward ends.

Outside of any `with`, a module runs in "rl_sampler" if it is in eval mode and no gradient is recorded, and in
"pretrain" otherwise. What a model generates then depends neither on the batch nor on a cache, as with the exported
weights.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from ..errors import Refused

STAGES = ("pretrain", "rl_sampler", "rl_trainer")


class _State:
    """The stage of one thread.

    Attributes:
        name: the stage; None outside of any `with`.
        taken: autograd's ids of the backwards whose saved tensors set the stage, the innermost last, each with the
            stage before it.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.taken: list[tuple[int, str | None]] = []

    def take_back(self, name: str | None, backward: int) -> None:
        """Put the thread in the stage of a tensor that a backward unpacks, until that backward ends."""
        if not self.taken or self.taken[-1][0] != backward:
            self.taken.append((backward, self.name))
            Variable._execution_engine.queue_callback(lambda: self.give_back(backward))
        self.name = name

    def give_back(self, backward: int | None = None) -> None:
        """Undo take_back for a backward and for those inside it that failed; None: for all of them."""
        while self.taken:
            ended, self.name = self.taken.pop()
            if ended == backward:
                return


class _Threads(threading.local):
    """The _State of each thread: an object, since a backward may end on another thread than the one that it resets."""

    def __init__(self) -> None:
        self.state = _State()


# A threading.local, since torch.compile guards on its attributes and does not follow a ContextVar.
_threads = _Threads()


def check_stage(name: str) -> None:
    """Raises ValueError for an unknown stage."""
    if name not in STAGES:
        raise Refused(f"unknown stage {name!r}; accepted: {', '.join(STAGES)}")


def current_stage() -> str:
    """The stage that modules of this thread run in now; "pretrain" outside of any `with fp4ext.stage(…)`."""
    return _threads.state.name or "pretrain"


class stage:
    """Run modules in a stage: `with fp4ext.stage("rl_sampler"): …`.

    Args:
        name: "pretrain", "rl_sampler" or "rl_trainer".

    The stage is that of the current thread: other threads are not affected, and a new thread has no stage. Coroutines
    of one thread share its stage.

    Raises:
        ValueError: an unknown stage.
        RuntimeError: the block ends in another stage than it began in, as when two coroutines interleave their blocks.
    """

    def __init__(self, name: str):
        check_stage(name)
        self.name = name

    def __enter__(self) -> None:
        state = _threads.state
        self.before, state.name = state.name, self.name
        # Compiled code needs no hooks: it recomputes by a graph, whose stage was fixed when it was traced.
        self.hooks = None if torch.compiler.is_compiling() else _carrying_the_stage()
        if self.hooks:
            self.hooks.__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.hooks:
            self.hooks.__exit__(kind, error, trace)
        state = _threads.state
        found, state.name = state.name, self.before
        if found != self.name and kind is None:
            raise RuntimeError(
                f"the block of stage {self.name!r} ends in stage {found or 'pretrain'!r}: blocks of one thread must "
                "nest, so a coroutine may not be suspended inside one"
            )


def stage_of(module: nn.Module) -> str:
    """The stage that a module's forward runs in: the thread's, or by the module's mode where the thread has none.

    Raises:
        RuntimeError: inside a backward whose saved tensors do not carry a stage, where the module last ran in another.
    """
    if torch.compiler.is_compiling():
        return _threads.state.name or _by_mode(module)
    backward, state = torch._C._current_graph_task_id(), _threads.state
    if backward == -1:
        state.give_back()  # a backward that failed did not
    name = state.name or _by_mode(module)
    if backward == -1:
        module.__dict__["_last_stage"] = name
    elif not (state.taken and state.taken[-1][0] == backward):
        last = module.__dict__.get("_last_stage", name)
        if last != name:
            raise RuntimeError(
                f"{type(module).__name__} is recomputed in a backward in stage {name!r}, but last ran in "
                f"{last!r}, and the stage of its forward is lost: saved_tensors_hooks of another kind, such as "
                "save_on_cpu, hide it; accepted: hooks outside of `with fp4ext.stage(…)`, or a backward that runs "
                "before the module runs in another stage"
            )
    return name


def _by_mode(module: nn.Module) -> str:
    """The stage of a module outside of any `with`."""
    if module.training or torch.is_grad_enabled():
        return "pretrain"
    stage: str = getattr(module, "inference_stage", "rl_sampler")
    return stage


def _carrying_the_stage() -> saved_tensors_hooks:
    """Hooks that save the stage's name with each tensor, around the hooks that are active already."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    outer_pack, outer_unpack = outer if outer else (_same, _same)

    def pack(t: Tensor) -> tuple[str | None, Any]:
        return _threads.state.name, outer_pack(t)

    def unpack(saved: tuple[str | None, Any]) -> Tensor:
        name, packed = saved
        backward = torch._C._current_graph_task_id()
        if backward != -1:  # a backward, not a caller who inspects a saved tensor
            _threads.state.take_back(name, backward)
        return outer_unpack(packed)

    return saved_tensors_hooks(pack, unpack)


def _same(t: Tensor) -> Tensor:
    return t
