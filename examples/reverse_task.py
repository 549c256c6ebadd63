"""A task of your own: three letters, backwards.

    python -m fp4ext rl --task examples/reverse_task.py

pretrains a small model on `text`, in which two answers of three are shuffled, and reinforces it by `reward`.
"""


class Reverse:
    most = 4  # tokens of a completion, the stop included
    stop = "\n"

    def prompt(self, rng) -> str:
        return "".join(rng.choice(list("abcdefgh"), 3)) + ">"

    def reward(self, prompt: str, completion: str) -> float:
        return float(completion == prompt[2::-1] + "\n")

    def text(self, rng) -> str:
        lines = []
        for _ in range(20_000):
            prompt = self.prompt(rng)
            letters = list(prompt[2::-1])
            if rng.random() < 2 / 3:
                rng.shuffle(letters)
            lines.append(prompt + "".join(letters) + "\n")
        return "".join(lines)
