"""A policy survives its file, and a file that is none says where."""

import sys

import pytest

from fp4ext import Fprop, Recipe, Spec, policies, policy_file
from fp4ext.policy import KEEP
from fp4ext.policy_file import from_dict, load, to_dict

ODD = policies.get("end_to_end").with_(
    name="odd",
    keep=("lm_head", "*.router"),
    keep_last=0.25,
    bf16_forward_from=100,
    mean_split=True,
    stats_every=7,
    rules=(("blocks.0.*", Recipe(Fprop(Spec("mxfp8"), Spec("mxfp8")))), ("blocks.1", Recipe(mean_split=True))),
)
POLICIES = [*map(policies.get, policies.names()), ODD]
FORMS = ["json", pytest.param("toml", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib"))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_it_survives(policy, form, tmp_path):
    path = tmp_path / f"{policy.name}.{form}"
    reasons = {"": "all of it", "pretrain.fprop.x": 'lowest "error"', "keep": "the head", "rules.0": "it drifts"}
    path.write_text(policy_file.dumps(policy, reasons, form))
    assert policy_file.load(path) == policy == policies.get(str(path)) == policies.get(path)
    assert "the head" in path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"keeps": []}', "a policy has no 'keeps'; accepted: bf16_forward_from, keep,"),
        ('{"pretrain": {"fprop": {"x": "nvfp5"}}}', "pretrain.fprop.x: unknown format 'nvfp5'"),
        ('{"pretrain": {"fprop": {"x": 4}}}', "pretrain.fprop.x is 4; accepted: a spec"),
        ('{"pretrain": {"dgrad": {"dy": "nvfp4/sweep/stochastic"}}}', "pretrain.dgrad.dy: unknown scale rule"),
        ('{"pretrain": {"fprop": {"x": "nvfp4/amax/nearest/1x16/tensor/16"}}}', "both operands need the same rht"),
        ('{"pretrain": {"dgrad": {"from_fprop": 1}}}', "from_fprop is 1; accepted: true, false"),
        ('{"rules": [{"recipe": {}}]}', r"rules\[0\] has no pattern"),
        ('{"keep_last": 3}', "keep_last is 3"),
        ('{"stats_every": -1}', "stats_every is -1"),
        ("[1]", "it holds a list; accepted: a table"),
        ("{", "policy file .*bad.json: "),
    ],
)
def test_what_is_no_policy_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        policy_file.load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="policy file .*none.toml: No such file"):
        policies.get(str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match="its name ends in '.yaml'; accepted: .toml, .json"):
        (tmp_path / "a.yaml").write_text("")
        policy_file.load(tmp_path / "a.yaml")


def test_parts_of_a_key_and_bf16(tmp_path):
    path = tmp_path / "short.json"
    path.write_text('{"pretrain": {"fprop": {"x": "nvfp4/sweep", "w": "bf16", "why": "a reason"}}}')
    policy = policy_file.load(path)
    assert policy.name == "short" and policy.pretrain == Recipe(Fprop(Spec("nvfp4", "sweep"), None))


@pytest.mark.parametrize("suffix, text", [
    pytest.param(".toml", 'keep_also = ["layers.0.*"]', marks=FORMS[1].marks),
    (".json", '{"keep_also": ["layers.0.*"]}'),
])  # fmt: skip
def test_a_file_adds_to_what_is_kept(suffix, text, tmp_path):
    """`keep` replaces the default, so that routers would be quantized."""
    path = tmp_path / f"mine{suffix}"
    path.write_text(text)
    policy = load(path)
    assert policy.keep == (*KEEP, "layers.0.*") and policy.keeps("mlp.router") and policy.keeps("layers.0.up")
    assert from_dict(to_dict(policy)) == policy and to_dict(policy)["keep_also"] == ["layers.0.*"]
    assert from_dict({"name": "a", "keep": ["b"], "keep_also": ["c"]}).keep == ("b", "c")


@pytest.mark.parametrize("value", ["lm_head", [1], {"a": 1}, None])
@pytest.mark.parametrize("key", ["keep", "keep_also"])
def test_patterns_are_a_list(key, value):
    """A text alone would become its letters."""
    with pytest.raises(ValueError, match=f"{key} is .*; accepted: a list of patterns"):
        from_dict({"name": "a", key: value})
