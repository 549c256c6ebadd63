"""The table of docs/interchange.md: which tool reads what fp4ext writes, and the other way round, checked now.

    python benchmarks/interchange.py [--docs]

Each line is a check of tests/export/judges.py, run here with the versions that are installed. A check that fails says
so in its line, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import torch
from rich.progress import track

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.export.judges import CASES, judge_version  # noqa: E402

DOCS = ROOT / "docs" / "interchange.md"
BEGIN, END = "<!-- checked: by benchmarks/interchange.py --docs -->\n", "<!-- end -->\n"
HEAD = "| layout | formats | direction | judge | seen |\n|---|---|---|---|---|\n"


def checked() -> list[tuple[str, ...]]:
    """A row for each check."""
    rows = []
    for case in track(CASES, description="judges"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                case.check(Path(folder))
                seen = case.seen
            except Exception as error:  # noqa: BLE001  (whatever it is, it belongs into the table)
                seen = f"**FAILED**: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        rows.append((case.layout, case.formats, case.direction, judge_version(case.judge), seen))
    return rows


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--docs", action="store_true", help="also write the table into docs/interchange.md")
    args = p.parse_args()
    rows = checked()
    table = HEAD + "".join("| " + " | ".join(row) + " |\n" for row in rows)
    where = f"\ntorch {torch.__version__}, Python {platform.python_version()}, CPU.\n"
    print(table + where)
    if args.docs:
        text = DOCS.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCS.write_text(before + BEGIN + "\n" + table + where + "\n" + END + after)
        print("docs:", DOCS)
    return int(any("FAILED" in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
