"""Others' tools read what fp4ext writes, and fp4ext reads what they write. judges.py has the checks."""

import pytest

from .judges import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_judge(case, tmp_path):
    case.check(tmp_path)
