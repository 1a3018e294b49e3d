"""Each stage on bases that scale or cap their logits: one step of plain gradient descent, against stock models.

The gradient that a step has taken is what the weights have lost, at a learning rate of 1. The oracle is the stock model
with PEFT's own adapter, one unpadded row at a time, and losses written out.
"""

import copy

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from trl import SFTConfig

from benchmarks.architectures import adapter_of, stock, tiny_model, with_roles
from tests.tolerances import RELATIVE
from tests.trainers.helpers import RESPONSES, SCORES, config, count_reward, rollout
from toolkit.data import doubling
from toolkit.errors import ConfigError
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.reward import RewardConfig, reward_trainer
from toolkit.trainers.sft import sft_trainer

KINDS = ("gemma2", "gemma3_text", "granite")
DESCENT = {
    "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1,
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "per_device_train_batch_size": 2, "gradient_checkpointing": True,
}  # fmt: skip
PROMPTS = [[1, 4, 9, 7], [1, 30, 31, 32, 33, 34], [1, 5, 6], [1, 20, 21, 22, 23]]


@pytest.fixture(params=KINDS)
def bases(request):
    """The shared base, and the same model as it was."""
    model = tiny_model(request.param, vocab_size=len(doubling.VOCABULARY))
    alone = copy.deepcopy(model)
    return with_roles(model), alone


def weights(base, role):
    return [p.detach().clone() for p in base.parameters_of(role)]


def assert_descended(before, base, role, own, head=None):
    """The adapter of a role lost the gradients of its own model, and its head those of a copy."""
    taken = [old - new for old, new in zip(before, weights(base, role), strict=True)]
    expected = [p.grad for p in adapter_of(own, role)] + ([] if head is None else [head.weight.grad])
    for one, other in zip(taken, expected, strict=True):
        assert (one - other).abs().max() < RELATIVE * other.abs().max()


def states(model, ids):
    return model.get_base_model().base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]


def test_sft(bases, tmp_path):
    base, alone = bases
    own, before = stock(base, alone, "policy"), weights(base, "policy")
    rows = [{"input_ids": p + r, "labels": [-100] * len(p) + r} for p, r in zip(PROMPTS, RESPONSES, strict=True)][:2]
    args = SFTConfig(str(tmp_path), max_length=None, **DESCENT)
    sft_trainer(args, doubling.tokenizer(), base, Dataset.from_list(rows), callbacks=[]).train()
    log_p = [own(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].log_softmax(-1) for row in rows]
    chosen = [lp[torch.arange(len(lp)), row["input_ids"][1:]] for lp, row in zip(log_p, rows, strict=True)]
    kept = [lp[len(prompt) - 1 :] for lp, prompt in zip(chosen, PROMPTS, strict=False)]
    (-torch.cat(kept).mean()).backward()
    assert_descended(before, base, "policy", own)


def test_a_loss_without_the_scale_of_the_logits_is_refused(tmp_path):
    args = SFTConfig(str(tmp_path), loss_type="dft", **DESCENT)
    with pytest.raises(ConfigError, match="^loss_type: TRL takes dft of logits without the scale that a GraniteFor"):
        sft_trainer(args, doubling.tokenizer(), with_roles(tiny_model("granite")), Dataset.from_list([]))


def test_reward(bases, tmp_path):
    base, alone = bases
    own, before = stock(base, alone, "reward"), weights(base, "reward")
    head = copy.deepcopy(base.head("reward")).requires_grad_(True)
    pairs = {"chosen_ids": [[1, 4, 9, 5, 2], [1, 7, 5, 2]], "rejected_ids": [[1, 4, 9, 6, 8, 8, 2], [1, 7, 6, 2]]}
    args = RewardConfig(str(tmp_path), max_length=None, **DESCENT)
    reward_trainer(args, doubling.tokenizer(), base, Dataset.from_dict(pairs), callbacks=[]).train()
    scores = [torch.cat([head(states(own, ids)[-1]) for ids in side]) for side in pairs.values()]
    (-logsigmoid(scores[0] - scores[1]).mean()).backward()
    assert_descended(before, base, "reward", own, head)


def test_ppo(bases, tmp_path):
    base, alone = bases
    own = {role: stock(base, alone, role) for role in ("policy", "value")}
    before, head = {role: weights(base, role) for role in own}, copy.deepcopy(base.head("value"))
    args = config(tmp_path, **DESCENT | {"per_device_train_batch_size": 4, "vf_coef": 0.5, "max_steps": 1})
    prompts = Dataset.from_dict({"input_ids": PROMPTS})
    ours = PPOTrainer(args, doubling.tokenizer(), base, count_reward(7), prompts, callbacks=[])
    experience = ours._make_experience(rollout(RESPONSES), SCORES)
    mask = experience.response_mask
    found = {"old_logprobs": [], "ref_logprobs": [], "old_values": []}
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids, tokens = torch.tensor([prompt + response]), (torch.arange(len(response)), torch.tensor(response))
        for name, model in (("old_logprobs", own["policy"]), ("ref_logprobs", alone)):
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / args.temperature
            found[name].append(logits.log_softmax(-1)[tokens])
        found["old_values"].append(head(states(own["value"], prompt + response)[len(prompt) - 1 : -1]).squeeze(-1))
    for name, rows in found.items():
        torch.testing.assert_close(getattr(experience, name)[mask], torch.cat(rows).detach(), rtol=1e-4, atol=1e-5)
    ours.step({}, rollout(RESPONSES), SCORES)
    # Before the first step the ratio is 1, and nothing is clipped.
    (-(experience.advantages[mask] * torch.cat(found["old_logprobs"])).mean()).backward()
    (0.5 * 0.5 * (torch.cat(found["old_values"]) - experience.returns[mask]).square().mean()).backward()
    assert_descended(before["policy"], base, "policy", own["policy"])
    assert_descended(before["value"], base, "value", own["value"], head)
