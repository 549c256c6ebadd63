"""A policy's steps in the Trainer of transformers, which does not know them.

    trainer = Trainer(model, args, callbacks=[fp4ext.integrations.transformers.SetStep()], …)

Whoever writes the loop calls fp4ext.set_step(model, step) before each step instead; a policy without
bf16_forward_from needs neither.
"""

from __future__ import annotations

try:
    from transformers import TrainerCallback
except ImportError:
    raise ImportError(
        "fp4ext.integrations.transformers needs transformers: pip install 'fp4ext[transformers]'"
    ) from None

from ..conversion.in_place import set_step


class SetStep(TrainerCallback):
    """Tells a converted model the step that the Trainer is at: before each one, and where a run is resumed."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        set_step(model, state.global_step)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        set_step(model, state.global_step)
