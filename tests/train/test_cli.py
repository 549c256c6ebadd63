"""python -m fp4ext, as a person meets it: one clear line for every refused input, and Ctrl-C that loses nothing."""

import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest

import fp4ext
from fp4ext.cli import main
from fp4ext.train import resume

from .conftest import InterruptAt


def refused(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert (
        stop.value.code == 2
        and captured.out == ""
        and captured.err.count("\n") == 1
        and captured.err.startswith("fp4ext: ")
    )
    return captured.err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--steps", "0"], "--steps: '0'; accepted: a whole number from 1"),
        (["--steps", "ten"], "--steps: 'ten'; accepted"),
        (["--lr", "2"], "--lr: '2'; accepted: a number between 0 and 1"),
        (["--warmup", "0"], "--warmup: '0'; accepted: a whole number from 1"),
        (["--seed", "-1"], "--seed: '-1'; accepted: a whole number from 0"),
        (["--policies", "bf16,int3"], "unknown policy 'int3'; accepted: bf16"),
        (["--policies", "bf16,bf16"], "'bf16' is given twice"),
        (["--policies", ","], "none given"),
        (["--preset", "huge"], "unknown preset 'huge'; presets: tiny, small"),
        (["--data", "nowhere.txt"], "nowhere.txt: no such file or folder; accepted"),
        (["--device", "tpu"], "--device: 'tpu'; accepted: cpu, cuda"),
        (["--resume", "nowhere"], "nowhere: not a run directory"),
        (["--resume", "nowhere", "--out", "elsewhere"], "not allowed with"),
        (["--threads", "99999"], "--threads: 99999; accepted"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_refuses_in_one_line(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, "pretrain", *argv)
    assert list(tmp_path.iterdir()) == []


def test_refuses_an_unknown_command(capsys):
    assert "invalid choice: 'train'" in refused(capsys, "train")


@pytest.mark.parametrize("argv", [["--help"], ["pretrain", "--help"]])
def test_help_teaches(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "examples:" in out and "python -m fp4ext pretrain" in out


def options(text, steps: int):
    """The tiny preset with little work."""
    return [
        "--data",
        str(text),
        "--policies",
        "bf16",
        "--batch",
        "1",
        "--steps",
        str(steps),
        "--eval-every",
        "9999",
        "--threads",
        "1",
    ]


def test_pretrain_prints_the_table(capsys, tmp_path, text):
    schedule = ["--lr", "1e-3", "--warmup", "7"]
    assert main(["pretrain", *options(text, 2), *schedule, "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert (
        "step 2/2  valid loss: bf16" in out and "bf16 " in out and f"report: {tmp_path / 'run' / 'report.html'}" in out
    )
    assert "--lr 0.001 --warmup 7" in (tmp_path / "run" / "report.html").read_text()
    assert "warmup: 7, now 100" in refused(capsys, "pretrain", *options(text, 2), "--out", str(tmp_path / "run"))
    assert "holds this very run" in refused(
        capsys, "pretrain", *options(text, 2), *schedule, "--out", str(tmp_path / "run")
    )
    assert "steps: 2, now 3" in refused(capsys, "pretrain", "--steps", "3", "--resume", str(tmp_path / "run"))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, text):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fp4ext", "pretrain", *options(text, 9000), "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    deadline = time.monotonic() + 60
    while not ((out / "metrics.jsonl").exists() and '"step": 5' in (out / "metrics.jsonl").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert f"python -m fp4ext pretrain --resume {out}" in stdout and "Traceback" not in stderr
    (step,) = (out / "checkpoints").iterdir()
    stopped = json.loads((step / "manifest.json").read_bytes())["step"]
    result = resume(out, show=InterruptAt(stopped + 5), tensorboard=False)
    assert not result.finished and result.step == stopped + 5
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(0, stopped + 6, 5))


def test_lines_reach_a_pipe_while_the_run_goes_on(tmp_path, text):
    command = [sys.executable, "-m", "fp4ext", "pretrain", *options(text, 9000), "--out", str(tmp_path / "run")]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=buffered)
    try:
        assert select.select([process.stdout], [], [], 120)[0] and process.poll() is None
        assert b"M parameters, 9000 steps" in process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("at", ["data.load", "pretraining.arm.Arm.__init__", "runs.directory.Run.save"])
def test_ctrl_c_before_the_first_checkpoint_recommends_what_works(tmp_path, text, monkeypatch, capsys, at):
    """At every moment the command that is named goes on or begins again."""
    out, begin = tmp_path / "run", ["pretrain", *options(text, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(f"fp4ext.train.{at}", lambda *given, **more: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([*begin, "--out", str(out)]) == 130
    said = capsys.readouterr().err
    if at == "runs.directory.Run.save":
        assert said.endswith(f"python -m fp4ext pretrain --resume {out}\n")
        assert main(["pretrain", "--resume", str(out)]) == 0
    else:
        assert said.endswith("the same command\n") and not out.exists()
        assert main([*begin, "--out", str(out)]) == 0


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["pretrian"], []])
def test_what_needs_no_torch_imports_none(argv):
    command = [sys.executable, "-X", "importtime", "-m", "fp4ext", *argv]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == (0 if argv and argv[0].startswith("--") else 2)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "fp4ext.cli" in imported and not imported & {"torch", "numpy", "rich", "safetensors"}


@pytest.mark.parametrize("error", [ValueError("accepted: nothing, policies: none"), TypeError("a fault")])
def test_an_error_of_our_own_keeps_its_traceback(monkeypatch, error):
    """Whatever words its message has: only Refused is a person's error."""
    monkeypatch.setattr("fp4ext.backends", lambda: (_ for _ in ()).throw(error))
    with pytest.raises(type(error), match=str(error)):
        main(["backends"])


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"fp4ext {fp4ext.__version__}\n"


def test_train_needs_no_import_of_its_own():
    """As docs/interchange.md uses it, in a process that has imported nothing else."""
    code = "import fp4ext; fp4ext.train.exported.load; fp4ext.train.rl.Config; fp4ext.train.pretrain"
    subprocess.run([sys.executable, "-c", code], check=True)
