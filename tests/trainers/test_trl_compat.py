"""With and without TRL's PPO: the same settings and defaults, and a sentence where its own loop is asked for."""

import inspect
from dataclasses import MISSING, fields
from importlib.metadata import version
from typing import get_type_hints

import pytest
from packaging.version import Version
from transformers import Trainer, TrainingArguments

from tests.trainers.helpers import config
from toolkit.errors import ConfigError
from toolkit.trainers import ppo_config, trl_compat

OURS = {f.name: f for f in fields(trl_compat.PPOFields)}


@pytest.mark.smoke
def test_what_is_installed_is_told_by_what_it_has():
    assert (Version(version("trl")) < Version("1.13")) == trl_compat.HAS_PPO
    if not trl_compat.HAS_PPO:
        assert trl_compat.TRLPPOTrainer is Trainer and trl_compat.TRLPPOConfig is trl_compat.PPOFields


def test_fields_and_defaults_are_those_of_trls_last_class(tmp_path):
    theirs = pytest.importorskip("trl.experimental.ppo", reason="TRL 1.12 is the last with PPO").PPOConfig
    hints = get_type_hints(theirs), get_type_hints(trl_compat.PPOFields)
    changed = inspect.get_annotations(trl_compat.PPOFields)
    assert len(changed) == 20
    for f in fields(theirs):
        inherited = f.name in {g.name for g in fields(TrainingArguments)}
        if f.name in OURS and f.default is not MISSING:
            assert f.default == OURS[f.name].default, f.name
        if f.name in changed:
            assert hints[0][f.name] == hints[1][f.name], f.name
        assert f.name in OURS or not inherited, f.name
    for precision in ({}, {"fp16": True}, {"bf16": False}):
        one, other = (owner(str(tmp_path), use_cpu=True, **precision) for owner in (theirs, trl_compat.PPOFields))
        assert (one.bf16, one.fp16) == (other.bf16, other.fp16)


def test_trls_own_loop_says_in_a_sentence_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_config, "HAS_PPO", False)
    with pytest.raises(
        ConfigError, match=r"loop — trl is the loop of TRL 1.12, .*and 1\.\d+\.\d+ is installed"
    ) as raised:
        config(tmp_path, loop="trl")
    assert raised.value.problems[0].remedy == 'Take toolkit, or install "trl>=1.12,<1.13".'
