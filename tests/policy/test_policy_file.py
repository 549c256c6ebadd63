"""A policy survives its file, and a file that is none says where."""

import os
import sys

import pytest

from fp4ext import Fprop, Recipe, Spec, policies
from fp4ext.policy import policy_file
from fp4ext.policy.policy import KEEP
from fp4ext.policy.policy_file import from_dict, load, to_dict

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
FORMS = ["json", "toml"]


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
        ('{"keeps": []}', "a policy has no 'keeps'; accepted: bf16_forward_from, invariant, keep,"),
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
        ('{"keep": "lm_head"}', "keep is 'lm_head'; accepted: a list of patterns"),
        ('{"keep": {"lm_head": 1}}', "keep is {'lm_head': 1}; accepted: a list of patterns"),
        ('{"keep": ["lm_head", 3]}', r"keep is \['lm_head', 3\]; accepted: a list of patterns"),
        ('{"mean_split": "false"}', "mean_split is 'false'; accepted: true, false"),
        ('{"pretrain": {"mean_split": "false"}}', "pretrain.mean_split is 'false'; accepted: true, false"),
        ('{"rules": [{"pattern": "a", "recipe": {"mean_split": 0}}]}', r"rules\[0\].recipe.mean_split is 0"),
        ('{"bf16_forward_from": "soon"}', "bf16_forward_from is 'soon'; accepted: a step"),
        ('{"bf16_forward_from": 1.5}', "bf16_forward_from is 1.5; accepted: a step"),
        ('{"bf16_forward_from": -1}', "bf16_forward_from is -1; accepted: a step"),
        ('{"bf16_forward_from": true}', "bf16_forward_from is True; accepted: a step"),
        ('{"keep_last": "0.1"}', "keep_last is '0.1'; accepted: a share"),
        ('{"keep_last": true}', "keep_last is True; accepted: a share"),
        ('{"keep_last": NaN}', "NaN is no JSON number"),
        ('{"stats_every": "often"}', "stats_every is 'often'"),
        ('{"name": 5}', "name is 5; accepted: a text"),
        ('{"name": null}', "name is None; accepted: a text"),
        ('{"name": ""}', "name is ''; accepted: a text"),
        ('{"pretrain": null}', "pretrain is None; accepted: a table"),
        ('{"pretrain": {"fprop": "nvfp4"}}', "pretrain.fprop is 'nvfp4'; accepted: a table"),
        ('{"rl_sampler": []}', r"rl_sampler is \[\]; accepted: a table"),
        ('{"rules": {"a": 1}}', "rules is {'a': 1}; accepted: a list of tables"),
        ('{"rules": "a"}', "rules is 'a'; accepted: a list of tables"),
        ('{"rules": ["a"]}', r"rules\[0\] is 'a'; accepted: a table"),
        ('{"rules": [{"pattern": 3}]}', r"rules\[0\].pattern is 3; accepted: a text"),
        ('{"rules": [{"pattern": "a", "recipe": null}]}', r"rules\[0\].recipe is None; accepted: a table"),
        ('{"keep_last": 0.1, "keep_last": 0.2}', "'keep_last' is there twice"),
        ('{"pretrain": {"fprop": {"x": "nvfp4", "x": "mxfp8"}}}', "'x' is there twice"),
        ('{"keep": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"name": "\udcff"}', "bad.json: "),
    ],
)
def test_what_is_no_policy_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        policy_file.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 5", "name is 5; accepted: a text"),
        ('keep = "lm_head"', "keep is 'lm_head'; accepted: a list of patterns"),
        ('mean_split = "false"', "mean_split is 'false'; accepted: true, false"),
        ("keep_last = nan", "keep_last is nan; accepted: a share"),
        ("keep_last = 0.1\nkeep_last = 0.2", "policy file .*bad.toml: Cannot overwrite a value"),
        ("keep = " + "[" * 100_000 + "]" * 100_000, "nested too deep"),
        ("bf16_forward_from = 1979-05-27", "bf16_forward_from is datetime.*; accepted: a step"),
    ],
)
def test_what_is_no_policy_is_refused_in_toml(text, message, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        policy_file.load(path)


@pytest.mark.parametrize("suffix", policy_file.SUFFIXES)
def test_a_pipe_is_refused_and_not_waited_for(suffix, tmp_path):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    with pytest.raises(ValueError, match=f"policy file .*pipe{suffix}: not a regular file"):
        policy_file.load(tmp_path / f"pipe{suffix}")


def test_toml_without_the_standard_librarys_reader(monkeypatch, tmp_path):
    """Python 3.10 has none; tomli, which fp4ext depends on there, has the same functions."""
    tomllib = pytest.importorskip("tomllib")
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    (tmp_path / "a.toml").write_text('name = "mine"')
    assert policy_file.load(tmp_path / "a.toml").name == "mine"


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
    (".toml", 'keep_also = ["layers.0.*"]'),
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
