"""One damaged file in a run's directory: the run goes on to the same bytes, or the file is named."""

import copy
import json
import os
import shutil

import pytest

from fp4ext.train import Refused, exported, pretrain, resume
from fp4ext.train import load as run_load
from fp4ext.train.pretraining import Result
from fp4ext.train.rl.loop import Start
from fp4ext.train.runs import checkpoint, digest
from fp4ext.train.runs import directory as rundir

from .conftest import InterruptAt
from .test_crashes import CONFIG, Toy, left


@pytest.fixture
def toy(tmp_path):
    """A run that was stopped after two steps."""
    out, arm = tmp_path / "run", Toy()
    with rundir.create(out, CONFIG) as directory:
        directory.without_tensorboard()
        for step in range(2):
            directory.log([{"step": step, "policy": "toy", "train_loss": 0.1}])
            directory.save(step, [arm])
    return out


def loaded(out) -> tuple:
    arm = Toy()
    with rundir.reopen(out) as directory:
        return directory.load([arm]), arm.weights.tolist(), rundir.read_metrics(out)


FILES = ("config.json", "metrics.jsonl", "manifest.json", "toy.weights.safetensors", "toy.optimizer.safetensors")


def found(out, name):
    return next(out.rglob(name))


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_seen(toy, name):
    path, whole = found(toy, name), loaded(toy)
    data, undamaged = path.read_bytes(), left(toy)
    for at in range(len(data)):
        for bit in {at % 8, 5}:  # 5 makes small letters of capitals
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            try:
                assert loaded(toy) == whole, (at, bit)
            except Refused as error:
                assert name in str(error), (at, bit, str(error))
    path.write_bytes(data)
    assert left(toy) == undamaged and loaded(toy) == whole


@pytest.mark.parametrize("name", FILES)
def test_every_cut_is_seen_and_a_missing_file_too(toy, name):
    path, whole = found(toy, name), loaded(toy)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        if data[length:] == b"\n" and name.endswith(".json"):  # nothing of its value is missing
            assert loaded(toy) == whole
            continue
        with pytest.raises(Refused, match=name):
            loaded(toy)
    path.unlink()
    with pytest.raises(Refused, match=name):
        loaded(toy)
    os.mkfifo(path)
    with pytest.raises(Refused, match=name):  # and nothing waits for somebody to write into it
        loaded(toy)
    path.unlink()
    path.mkdir()
    with pytest.raises(Refused, match=name):
        loaded(toy)


def test_a_line_that_was_cut_off_is_left_out(toy):
    whole = loaded(toy)
    with open(toy / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "poli')
    assert rundir.read_metrics(toy) == whole[2] and loaded(toy) == whole


@pytest.mark.parametrize("line", ["null", "[]", '{"policy": "toy"}', '{"step": "1"}', '{"step": 1', '{"step": NaN}'])
def test_a_line_that_is_none_is_named(toy, line):
    with open(toy / "metrics.jsonl", "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(Refused, match="metrics.jsonl: line 3 is none"):
        rundir.read_metrics(toy)


def values_of(value, path=()):
    for key, inner in value.items():
        if key not in digest.KEYS:
            yield (*path, key)
            if isinstance(inner, dict):
                yield from values_of(inner, (*path, key))


def changed(value: dict, path, new) -> dict:
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return value


@pytest.fixture
def stopped(micro, tmp_path):
    out = tmp_path / "run"
    pretrain(micro(steps=3, save_every=1), out, show=InterruptAt(2), tensorboard=False)
    return out


OTHERS = (None, "text", [None], -1, 1.5, {"a": None}, True)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_values_of_another_type_are_errors_that_name_the_file(stopped, name):
    """Whoever writes them with the right digest: reading gives no traceback."""
    path = found(stopped, name)
    data, value = path.read_bytes(), json.loads(path.read_bytes())
    tried = 0
    for place in values_of(value):
        for new in OTHERS:
            tried += 1
            path.write_bytes(digest.dumps(changed(value, place, new), one_by_one=name == "config.json"))
            for read in (exported.of_run, run_load.load, Start.read):
                try:
                    read(stopped)
                except Refused as error:
                    files = (name, *place[1:2], "metrics.jsonl")  # where the manifest says otherwise than another file
                    assert any(file in str(error) for file in files), (place, new, error)
            if changed(value, place, new) != value:
                with pytest.raises(Refused):
                    resume(stopped, asked={"steps": 4})
    assert tried > 80
    path.write_bytes(data)
    assert resume(stopped, tensorboard=False).finished


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [('"seed": 0', '"seed": 1', "run.seed"), ('"lr": 0.01', '"lr": 0.02', "run.preset.lr")],
)
def test_an_edit_is_refused_by_the_key(stopped, old, new, key):
    path = stopped / "config.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    for call in (resume, run_load.load, exported.of_run):
        with pytest.raises(Refused, match=rf"config.json: not what was written \({key}\)"):
            call(stopped)


def test_a_policy_is_no_file_in_a_configuration(stopped, tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    config = json.loads((stopped / "config.json").read_text())
    config["run"]["policies"] = [str(tmp_path / "mine.json")]
    (stopped / "config.json").write_bytes(digest.dumps(config))
    for read in (exported.of_run, run_load.load, Start.read, resume):
        with pytest.raises(Refused, match="mine.json' is a file; accepted: the name of a policy"):
            read(stopped)


def test_a_damaged_result_is_refused(micro, tmp_path):
    pretrain(micro(steps=2), tmp_path / "run", tensorboard=False)
    path = tmp_path / "run" / "result.json"
    data = path.read_bytes()
    for damage in (data[:-5], data.replace(b'"step": 2', b'"step": 3'), b""):
        path.write_bytes(damage)
        for read in (Result.read, rundir.read_metrics):
            with pytest.raises(Refused, match="result.json"):
                read(tmp_path / "run")
    value = json.loads(data)
    for place in (("rows",), ("rows", 0)):
        path.write_bytes(digest.dumps(changed(value, place, None)))
        with pytest.raises(Refused, match="result.json"):
            Result.read(tmp_path / "run")
    path.unlink()
    assert resume(tmp_path / "run", tensorboard=False).finished and path.exists()


# What a killed process or a user leaves beside the run's own files.


def test_a_kill_before_the_first_file_is_whole_bricks_nothing(tmp_path, micro):
    out = tmp_path / "run"
    out.mkdir()
    (out / ".config.json.writing").write_text('{"ru')
    assert pretrain(micro(steps=1), out, tensorboard=False).finished
    assert not (out / ".config.json.writing").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".config.json.mine").touch()
    with pytest.raises(Refused, match="holds other files"):
        pretrain(micro(), tmp_path / "other")


def test_copies_of_a_user_are_neither_read_nor_removed(stopped):
    folder = stopped / "checkpoints"
    step = checkpoint.latest(folder)
    for name in ("step-backup", "step-00000008.keep", "step-9", "step-000000099"):
        shutil.copytree(step, folder / name)
    (folder / "step-00000077").write_text("a file")
    (step / "notes.txt").write_text("mine")
    (step / "mine.safetensors").write_text("mine")
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent != step}
    kept |= {step / name: b"mine" for name in ("notes.txt", "mine.safetensors")}
    assert checkpoint.latest(folder) == step
    assert resume(stopped, tensorboard=False).finished
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert not (step / "manifest.json").exists() and checkpoint.latest(folder).name == "step-00000003"


def test_a_step_under_another_number_is_refused(stopped):
    step = checkpoint.latest(stopped / "checkpoints")
    step.rename(step.with_name("step-00000009"))
    with pytest.raises(Refused, match="manifest.json: step is 2; accepted: the step that the folder is named after"):
        resume(stopped)


@pytest.mark.parametrize("name", ["../../config.json", "/etc/passwd", "a/b.safetensors", "x.txt"])
def test_a_manifest_names_files_of_its_folder_alone(stopped, name):
    path = checkpoint.latest(stopped / "checkpoints") / "manifest.json"
    value = json.loads(path.read_bytes())
    value["files"][name] = {"bytes": 1, "blake2": "0"}
    path.write_bytes(digest.dumps(value))
    with pytest.raises(Refused, match="accepted: names of safetensors in the same folder"):
        resume(stopped)
