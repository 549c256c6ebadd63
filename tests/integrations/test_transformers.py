"""A policy that changes with the step, under the Trainer of transformers."""

from importlib.util import find_spec

import pytest
import torch

import fp4ext
from fp4ext import policies

transformers = pytest.importorskip("transformers", minversion="5.24")

from fp4ext.integrations.transformers import SetStep  # noqa: E402  (needs transformers)


class Model(torch.nn.Module):
    """One linear layer, which notes whether its forward was BF16's."""

    def __init__(self):
        super().__init__()
        self.layer, self.quantized = torch.nn.Linear(32, 32), []

    def forward(self, x, labels=None):
        if self.training:
            self.quantized.append(self.layer.recipes["pretrain"].fprop.x is not None)
        y = self.layer(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


def test_the_events_of_a_trainer_reach_the_layers():
    model = Model()
    fp4ext.convert(model, policies.get("end_to_end").with_(bf16_forward_from=3))
    handler = transformers.trainer_callback.CallbackHandler([SetStep()], model, None, None, None)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    for event, step, quantized in (("train", 4, False), ("train", 0, True), ("step", 2, True), ("step", 3, False)):
        state.global_step = step
        getattr(handler, f"on_{event}_begin")(None, state, control)
        assert (model.layer.recipes["pretrain"].fprop.x is not None) == quantized, (event, step)


def trained(folder, callbacks, steps=6, resume=None, save=0):
    torch.manual_seed(0)
    model = Model()
    fp4ext.convert(model, policies.get("end_to_end").with_(bf16_forward_from=3))
    data = [{"x": x, "labels": x} for x in torch.randn(64, 32)]
    args = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="steps" if save else "no", save_steps=save or 500, gradient_accumulation_steps=2,
    )  # fmt: skip
    transformers.Trainer(model, args, train_dataset=data, callbacks=callbacks).train(resume_from_checkpoint=resume)
    return model.quantized


needs_accelerate = pytest.mark.skipif(not find_spec("accelerate"), reason="the Trainer needs accelerate")


@needs_accelerate
def test_the_forward_becomes_bf16s_at_its_step(tmp_path):
    """Two micro-batches a step."""
    assert trained(tmp_path / "a", [SetStep()]) == [True] * 6 + [False] * 6
    assert trained(tmp_path / "b", []) == [True] * 12  # what the Trainer does alone


@needs_accelerate
def test_a_resumed_run_begins_at_its_step(tmp_path):
    trained(tmp_path, [SetStep()], steps=4, save=4)
    quantized = trained(tmp_path, [SetStep()], steps=6, resume=str(tmp_path / "checkpoint-4"))
    assert quantized == [False] * 4
