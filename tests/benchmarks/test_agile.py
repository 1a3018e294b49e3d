"""The contender of AgileRL without AgileRL: its agent is one of ours that has the same methods."""

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import GenerationConfig

from benchmarks import agile, worker
from benchmarks.clock import PhaseClock
from benchmarks.compare import check_equal, partner_of
from benchmarks.contenders import CONTENDERS
from benchmarks.errors import BenchmarkError
from benchmarks.start import Built, Job, lora
from benchmarks.work import PHASES, padding_tokenizer
from toolkit.models import load_base


class Agent:
    """The methods that the benchmark calls or watches; its old log-probabilities are -2, the reference's -3."""

    def __init__(self, model, eos_token_id):
        self.model, self.pad_token_id, self.learned = model, eos_token_id, []

    def get_action(self, prompts):
        (batch,) = prompts
        end, start = self.pad_token_id, batch["input_ids"].shape[1]
        config = GenerationConfig(max_new_tokens=10, do_sample=True, top_k=0, pad_token_id=end, eos_token_id=end)
        tokens = self.model.generate(**batch, generation_config=config)
        before = (tokens[:, start:] == end).cumsum(1) - (tokens[:, start:] == end).int()
        return [tokens], [torch.cat([torch.zeros(len(tokens), start - 1, dtype=torch.bool), before == 0], 1)]

    def learn(self, experiences):
        self.learned.append(experiences)
        longest = max(row.shape[1] for row in experiences[0])
        self._fused_forward_no_grad((len(experiences[0]), longest - 1))
        self._epoch_orders()
        return {"pg_loss": 0.5, "vf_loss": 0.2}

    def _fused_forward_no_grad(self, shape):
        return torch.full(shape, -3.0), torch.full(shape, -2.0), torch.zeros(shape)

    def _epoch_orders(self):
        return []


@pytest.fixture
def built(checkpoint):
    model = load_base(checkpoint)
    agent = Agent(model, padding_tokenizer(checkpoint).eos_token_id)
    return Built(agent, model, list(model.parameters()), torch.zeros(1, 1))


def test_updates_are_of_the_given_responses_and_timed_by_phase(built, work):
    clock = PhaseClock()
    found = agile.run(built, work, clock, 2)
    assert [tuple(update) for update in clock.updates] == [PHASES] * 2
    assert found == {
        "score": 0.0, "policy_loss": 0.5, "value_loss": 2.0,
        # One and two a token of the responses, and none of the prompts' or beyond the end.
        "kl": sum(work.lengths) / 4, "entropy": 2 * sum(work.lengths) / 4,
    }  # fmt: skip
    for tokens, masks, scores in built.trainer.learned:
        whole = [[*prompt, *response] for prompt, response in zip(work.prompt_ids, work.responses, strict=True)]
        assert [row.tolist() for row in tokens] == [[ids] for ids in whole]
        assert [row.shape for row in masks] == [(1, len(ids) - 1) for ids in whole]
        assert [int(row.sum()) for row in masks] == work.lengths and all(bool(row[0, -1]) for row in masks)
        assert scores.tolist() == [0.0] * 4


def test_another_response_is_refused(built, work, monkeypatch):
    rollout = agile.rollout
    monkeypatch.setattr(agile, "rollout", lambda *given: tuple(rows[::-1] for rows in rollout(*given)))
    with pytest.raises(BenchmarkError, match="the response to prompt 0 is not the given one"):
        agile.run(built, work, PhaseClock(), 1)


def test_it_starts_from_the_weights_of_the_others(checkpoint, work, tmp_path):
    peft = get_peft_model(load_base(checkpoint), lora(), adapter_name="actor")
    peft.add_adapter("critic", lora())
    actor = nn.Module()
    actor.pretrained_model, actor.v_head = peft, nn.Module()
    actor.v_head.summary = nn.Linear(peft.config.hidden_size, 1)
    actor.v_head.support_avx512bf16_for_cpu = True
    agent = nn.Module()
    agent.actor = actor
    found = agile.started(agent)
    job = Job(checkpoint, work, padding_tokenizer(checkpoint), tmp_path, updates=1)
    ours = CONTENDERS["ours-separate-unscored"].build(job)
    assert "reward" not in ours.trainer.roles.roles
    assert torch.equal(found.value_head, ours.value_head) and not bool(actor.v_head.summary.bias)
    assert len(found.policy) == len(ours.policy) > 0
    assert all(torch.equal(a, b) for a, b in zip(found.policy, ours.policy, strict=True))
    assert found.generator is peft.get_base_model() and not actor.v_head.support_avx512bf16_for_cpu


def test_without_a_reward_role_ours_compute_the_same(checkpoint, work):
    names = ("ours-separate-unscored", "ours-shared-unscored")
    found = {name: worker.compare(checkpoint, work, name, dtype="float32") for name in names}
    check_equal(found)
    assert [partner_of(name) for name in ("agilerl", "agilerl-nf4")] == [names[0], f"{names[0]}-nf4"]
    rewarded = worker.compare(checkpoint, work, "ours-separate", dtype="float32")
    assert rewarded["score"] != 0 and found[names[0]]["score"] == 0
    assert found[names[0]]["entropy"] == pytest.approx(rewarded["entropy"])
    assert found[names[0]]["value_loss"] != pytest.approx(rewarded["value_loss"], rel=1e-3)


def test_it_is_not_built_where_the_others_are(checkpoint, work):
    with pytest.raises(BenchmarkError, match="in an environment that has it"):
        worker.measure(checkpoint, work, "agilerl", dtype="float32", updates=1)
