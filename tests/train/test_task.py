"""Tasks: the one that ships, and those of a file."""

from pathlib import Path

import pytest

from fp4ext.train import Config, Refused, data, task

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
    with pytest.raises(Refused, match="tasks in the file: none; accepted: one class with text, prompt, reward"):
        task.load(str(file))
    file.write_text("import nothing_like_this")
    with pytest.raises(Refused, match="ModuleNotFoundError.*accepted: a file that can be imported"):
        task.load(str(file))
    two = "\n".join(f"class {n}:\n    text = prompt = reward = None" for n in "AB")
    file.write_text(two)
    with pytest.raises(Refused, match="tasks in the file: A, B; accepted: one class"):
        task.load(str(file))
    assert type(task.load(f"{file}:B")).__name__ == "B"
