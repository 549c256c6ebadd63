"""Tasks: the one that ships, and those of a file."""

from pathlib import Path

import pytest

from fp4ext.train import Config, Refused, data, end_to_end, rl, task

WHOLE = """
    most, stop = 2, "\\n"
    def text(self, rng): return "0>0\\n" * 2000
    def prompt(self, rng): return "0>"
    def reward(self, prompt, completion): return 1.0
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_task.py"


def test_arithmetic():
    t = task.load("arithmetic")
    assert t.reward("7+5=", "12\n") == 1
    assert [t.reward("7+5=", c) for c in ("12", "13\n", "12\n2", "", "\n", "012\n")] == [0] * 6
    rng = task.generator(3)
    prompts = [t.prompt(rng) for _ in range(200)]
    assert len(set(prompts)) > 60 and prompts == [t.prompt(r) for r in [task.generator(3)] for _ in range(200)]


@pytest.mark.parametrize("name, share", [("arithmetic", 0.5), (str(EXAMPLE), 1 / 3 + 2 / 3 / 6)])
def test_the_text_is_right_as_often_as_it_says(name, share):
    """Prompts and answers as the model will see them; for the letters, a shuffle is right by chance once in six."""
    t = task.load(name)
    lines = t.text(task.generator(0)).splitlines(keepends=True)
    mark = "=" if name == "arithmetic" else ">"
    right = 0
    for line in lines:
        at = line.index(mark) + 1
        assert len(line) - at <= t.most and line.endswith(t.stop)
        right += t.reward(line[:at], line[at:])
    # letters may repeat, so that a shuffle is right more often: a little above the share
    assert share - 0.02 < right / len(lines) < share + (0.02 if name == "arithmetic" else 0.1)


def test_as_data():
    corpus = data.load(["task:arithmetic"], context=64)
    assert corpus.source == "task:arithmetic" and corpus.files == 1 and b"+" in corpus.train[:64].tobytes()
    assert corpus.digest == data.load(["task:arithmetic"], context=64).digest
    assert Config("task", policies=["bf16"], data=["task:arithmetic"]).data == ("task:arithmetic",)
    with pytest.raises(Refused, match="a task beside others; accepted: task:NAME alone"):
        data.load(["task:arithmetic", "book.txt"])


def test_refusals(tmp_path):
    with pytest.raises(Refused, match="unknown task 'poetry'; accepted: arithmetic, or FILE.py"):
        task.load("poetry")
    with pytest.raises(Refused, match="no such file"):
        task.load(str(tmp_path / "none.py"))
    file = tmp_path / "mine.py"
    file.write_text("class A:\n    def text(self, rng): ...\n")
    with pytest.raises(Refused, match="in the file: none; accepted: one class with text, prompt, reward, most, stop"):
        task.load(str(file))
    file.write_text("import nothing_like_this")
    with pytest.raises(Refused, match="ModuleNotFoundError.*accepted: a file that can be imported"):
        task.load(str(file))
    file.write_text("".join(f"class {n}(object):\n{WHOLE}" for n in "AB"))
    with pytest.raises(Refused, match="tasks in the file: A, B; accepted: one class"):
        task.load(str(file))
    assert type(task.load(f"{file}:B")).__name__ == "B"


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("most, stop = 2, ", "stop = ", "Mine has no most; accepted: a class with text, prompt, reward, most, stop"),
        ('most, stop = 2, "\\n"', "most = 2", "Mine has no stop"),
        ("2, ", "0, ", "Mine.most is 0; accepted: a whole number of tokens from 1"),
        ("2, ", "True, ", "Mine.most is True"),
        ('"\\n"\n', '"ab"\n', "Mine.stop is 'ab'; accepted: a text of one byte"),
        ('"\\n"\n', "10\n", "Mine.stop is 10"),
        ('"0>"', "7", "Mine.prompt gives 7; accepted: a text"),
        ('"0>"', '""', "Mine.prompt gives ''"),
        ("return 1.0", "return 2", "Mine.reward gives 2; accepted: a number from 0 to 1"),
        ("return 1.0", "return None", "Mine.reward gives None"),
        ("return 1.0", "return completion[5]", "fails on a first prompt: IndexError: string index out of range"),
    ],
)
def test_a_task_that_lacks_something_is_refused_before_anything_is_trained(tmp_path, monkeypatch, old, new, words):
    file, made = tmp_path / "mine.py", f"class Mine:\n{WHOLE}"
    assert old in made
    file.write_text(made.replace(old, new))
    with pytest.raises(Refused, match=words):
        task.load(str(file))
    with pytest.raises(Refused, match=words):
        rl.reinforce(rl.Config(task=str(file), threads=1), tmp_path / "run")
    with pytest.raises(Refused, match=words):
        end_to_end.end_to_end(end_to_end.Config(task=str(file), threads=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_text_that_is_none_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"class Mine:\n{WHOLE}".replace('"0>0\\n" * 2000', "b'0>0'"))
    with pytest.raises(Refused, match="its text is a bytes; accepted: str"):
        data.load([f"task:{file}"])


def test_a_task_too_long_for_the_start_is_refused_before_it_is_trained(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"class Mine:\n{WHOLE}".replace("2, ", "60, "))
    with pytest.raises(Refused, match="answers of 60; accepted: less than 48 together"):
        rl.reinforce(rl.Config(task=str(file), threads=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
