"""fp4ext.json beside a checkpoint: what was decided when it was written, so that nobody has to guess it again.

{"decided_by": "the modules of the model", "policy": {…} or null, "left": {why: [weights]}}
"""

from __future__ import annotations

from pathlib import Path

from ..policy import policy_file
from ..policy.policy import Policy
from .choose import Chosen
from .errors import Invalid
from .folder import read_object

FILE = "fp4ext.json"


def decision(chosen: Chosen, left: dict[str, str]) -> dict[str, dict]:
    """The file of a checkpoint: name → object. Nothing where nothing was decided."""
    if not chosen.specs:
        return {}
    reasons: dict[str, list[str]] = {}
    for name, why in left.items():
        reasons.setdefault(why, []).append(name)
    policy = None if chosen.policy is None else policy_file.to_dict(chosen.policy)
    return {FILE: {"decided_by": chosen.by, "policy": policy, "left": reasons}}


def policy(folder: Path) -> Policy | None:
    """The policy that a checkpoint's folder records, None where it records none.

    Raises:
        Refused: what it holds is no policy.
    """
    said = read_object(folder / FILE).get("policy")
    if said is None:
        return None
    try:
        return policy_file.from_dict(said)
    except (ValueError, TypeError) as error:
        raise Invalid(f"{folder / FILE}: {error}") from None
