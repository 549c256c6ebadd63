"""What a run found: a row for each arm, of the class that the job gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from fp4ext.errors import Refused

from . import digest


@dataclass(frozen=True)
class Result:
    """A run's directory and outcome. If a `signal` stopped it after `step` steps: not `finished`, no `rows`."""

    row: ClassVar[type]

    out: Path
    finished: bool
    step: int
    rows: tuple = ()
    signal: int | None = None

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    @property
    def at(self) -> str:
        """Where it stands."""
        return f"step {self.step}"

    @classmethod
    def read(cls, out: Path) -> Result:
        """That of a finished run. Raises Refused where its result.json is not as the run wrote it."""
        found = digest.read(out / "result.json")
        try:
            return cls(out, finished=True, step=found["step"], rows=tuple(cls.row(**row) for row in found["rows"]))
        except (KeyError, TypeError) as error:
            what = f"not a result that this version of fp4ext knows ({error})"
            raise Refused(f"{out / 'result.json'}: {what}; accepted: the file as the run wrote it") from None

    def to_json(self) -> dict:
        return {"step": self.step, "rows": [asdict(row) for row in self.rows]}
