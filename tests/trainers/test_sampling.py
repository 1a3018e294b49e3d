"""What is sampled is what is trained: the checkpoint's own generation settings never reach a rollout."""

import pytest
import torch
from transformers import GenerationConfig

from tests.tiny_models import lora, randomize, tiny_model
from tests.trainers.helpers import PROMPTS, count_reward, trainer
from toolkit.data import PromptCollator
from toolkit.models import SharedBase

# What checkpoints come with, each strong enough to be seen.
OWN_SETTINGS = {
    "top_k": 1,
    "top_p": 0.01,
    "min_p": 0.99,
    "typical_p": 0.01,
    "epsilon_cutoff": 0.5,
    "temperature": 0.01,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 6,
    "num_beams": 3,
    "suppress_tokens": [*range(3, 9), *range(10, 36)],  # all but what is forced below
    "bad_words_ids": [[token] for token in range(3, 36)],
    "begin_suppress_tokens": list(range(3, 36)),
    "sequence_bias": [[[7], 50.0]],
    "forced_eos_token_id": 9,
}


def sampling_base(**own):
    model = tiny_model()
    model.generation_config = GenerationConfig(**own)
    base = SharedBase(model)
    base.add_role("policy", lora())
    base.add_role("reference")
    base.add_role("value", lora())
    return randomize(base, "policy")


def sampled(ours, do_sample):
    rows = [{"input_ids": ids, "number": 0} for ids in PROMPTS] * 4
    keys = torch.arange(len(rows))
    return ours.rollouts.sampler(do_sample=do_sample)(PromptCollator(0)(rows), keys=keys).response_ids


def answers(folder, do_sample, **own):
    return sampled(trainer(folder, sampling_base(**own), count_reward(7), temperature=1.0), do_sample)


def test_a_response_is_sampled_by_seed_update_prompt_and_how_many_it_had(tmp_path):
    """Whatever else is drawn between, and whichever prompts stand beside it."""

    def made(**changes):
        return trainer(tmp_path, sampling_base(), count_reward(7), temperature=1.0, **changes)

    def said(ours, *rows):
        return ours.generate(PromptCollator(0)([{"input_ids": PROMPTS[i], "number": 0} for i in rows])).response_ids

    ours = made()
    first, again = said(ours, 0, 1, 2), said(ours, 2, 1, 2)
    other = made()
    torch.rand(3)
    assert said(other, 2, 0) == [first[2], first[0]]
    torch.manual_seed(5)
    assert said(other, 1, 2, 2, 1) == [first[1], again[0], again[2], again[1]]
    later = made()
    later.state.global_step = 1
    of_all = [*first, *again, *said(later, 0, 1, 2), *said(made(seed=1), 0, 1, 2)]
    assert len({*map(tuple, of_all)}) == len(of_all)


@pytest.mark.parametrize("do_sample", [True, False])
def test_no_setting_of_the_checkpoint_changes_what_is_sampled(do_sample, tmp_path):
    plain = answers(tmp_path, do_sample)
    if answers(tmp_path, do_sample, **OWN_SETTINGS) != plain:
        changing = [name for name, own in OWN_SETTINGS.items() if answers(tmp_path, do_sample, **{name: own}) != plain]
        pytest.fail(f"of all settings at once these do so alone, too: {changing}")


def test_each_of_these_settings_would_change_it(tmp_path):
    """So that the test above can fail: put back after the base has been made, they do reach the samples."""
    ours = trainer(tmp_path, sampling_base(), count_reward(7), temperature=1.0)
    plain = {do_sample: sampled(ours, do_sample) for do_sample in (True, False)}
    for name, value in OWN_SETTINGS.items():
        if name in ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "temperature"):
            continue  # settings of transformers' sampling, which has no part in ours
        ours.roles.causal_lm.generation_config = GenerationConfig(**{name: value})
        try:
            changed = any(sampled(ours, do_sample) != plain[do_sample] for do_sample in plain)
        except RuntimeError:  # beams are more rows than were asked for
            changed = True
        assert changed, name
    ours.roles.causal_lm.generation_config = GenerationConfig()
    assert sampled(ours, True) == plain[True]  # so that no setting has changed more than its own samples
