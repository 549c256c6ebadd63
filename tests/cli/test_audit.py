"""The commands audit, cost and explain, as a person calls them."""

import json
import re
import sys

import pytest

from fp4ext import cli, policies
from fp4ext.cli.arguments import number, share
from fp4ext.train import pretrain

from ..audit.conftest import PRESET, one_thread  # noqa: F401  (one thread here too)
from ..train.runs.test_report import Page


def call(capsys, *words):
    """(exit code, stdout, stderr) of a command."""
    try:
        code = cli.main(list(words))
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import argparse

    from fp4ext.train import Config

    out = tmp_path_factory.mktemp("runs") / "demo"
    preset = PRESET.with_(steps=8, eval_every=8, save_every=8, eval_windows=4, final_windows=4)
    pretrain(Config(preset, policies=["bf16", "mxfp8"], data=[argparse.__file__], threads=1, stats=4), out)
    return out


def test_audit_of_a_run(run, capsys):
    words = ("audit", str(run), "--policies", "mxfp8", "--draws", "3", "--tokens", "64", "--batches", "1")
    code, out, err = call(capsys, *words, "--machine", "gb300", "--budget", "50%")
    assert "--draws 3: fewer than 32 may name drifts that are not there" in out
    assert code == 0 and not err and "report.html" in out and "MS-EDEN + sweep, two stages" in out
    text = (run / "audit" / "report.html").read_text()
    page = Page(re.sub("<script>.*?</script>", "", text, flags=re.S))
    assert not page.addresses and page.seen.count("svg") >= 8
    assert "http" not in text and "@import" not in text and "sortable" in text
    for expected in (
        "Noise and drift",
        "Operands and products",
        "at 256",
        "% blocks",
        "python -m fp4ext audit",
        "mnat",
    ):
        assert expected in text, expected
    assert "drift" in text  # mxfp8 rounds to nearest, and says so
    found = json.loads((run / "audit" / "report.json").read_text())
    assert len(found["rows"]["mxfp8"]) == 8 * 9 and found["faults"][0]["kind"] == "drift"
    advised = policies.get(str(run / "audit" / "advice.json"))
    assert advised.pretrain.fprop.x.format == "nvfp4"
    assert '"why"' in (run / "audit" / "advice.json").read_text()
    if sys.version_info >= (3, 11):
        assert policies.get(str(run / "audit" / "advice.toml")) == advised


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "/nowhere"], "not a run directory"),
        (["audit", "RUN", "--arm", "nvidia"], "--arm: 'nvidia' is no arm of .*; accepted: bf16, mxfp8"),
        (["audit", "RUN", "--policies", "int4"], "unknown policy 'int4'"),
        (
            ["audit", "RUN", "--machine", "gb300", "--out", "RUN/config.json"],
            "cannot be written .*; accepted: a directory",
        ),
        (["audit", "RUN", "--machine", "tpu"], "unknown machine 'tpu'; accepted: gb300"),
        (["audit", "RUN", "--budget", "x"], "'x'; accepted: a share above 0"),
        (["cost", "--model", "/nowhere"], "cannot be read"),
        (["cost", "--model", "RUN", "--tokens", "many"], "'many'; accepted: a number from 1"),
        (["explain", "3.2", "--grid", "4,3"], "accepted: two or more rising numbers"),
        (["explain", "1,2", "--spec", "nvfp5"], "unknown format 'nvfp5'"),
        (["explain", "1", "--grid", "1,2", "--spec", "nvfp4"], "--grid beside --spec"),
    ],
)
def test_one_line_says_what_was_wrong(words, message, run, capsys):
    code, _, err = call(capsys, *(word.replace("RUN", str(run)) for word in words))
    assert code == 2 and err.count("\n") == 1
    assert re.search(message, err), err


def test_a_model_folder_without_transformers(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = call(capsys, "audit", str(tmp_path))
    assert code == 2 and "a model folder needs transformers" in err


def test_cost_of_a_run(run, capsys):
    code, out, _ = call(capsys, "cost", "--model", str(run), "--tokens", "1M", "--gpus", "2", "--machine", "b200")
    assert code == 0
    for expected in (
        "binding:",
        "arithmetic",
        "memory per chip",
        "dgrad",
        "exchange",
        "1 M tokens:",
        "assumed, not measured",
    ):
        assert expected in " ".join(out.split()), expected
    code, out, _ = call(capsys, "cost", "--model", str(run), "--stage", "rl_sampler")
    assert code == 0 and "keys and values" in out and "wgrad" not in out


def test_explain_one_number(capsys):
    code, out, _ = call(capsys, "explain", "3.2", "--grid", "3,4")
    assert (
        code == 0 and "3, always: off by -0.2" in out and "4 with probability 0.2" in out and "mean of 1000: 3." in out
    )
    code, out, _ = call(capsys, "explain", "3.2")
    assert code == 0 and "3.2 between 3 and 4" in out
    code, out, _ = call(capsys, "explain", "0.1,0.4,3.2,5.9", "--spec", "mxfp4")
    assert code == 0 and "mxfp4/ceil" in out and "nvfp4/sweep" in out


def test_amounts_and_shares():
    assert number("10T") == 1e13 and number("300B") == 3e11 and number("5") == 5
    assert share("1%") == 0.01 == share("0.01")
