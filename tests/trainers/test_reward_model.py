"""A reward model on a base of its own: what it is trained on is what it reads in PPO."""

import json

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig
from trl import RewardTrainer as TRLRewardTrainer

from tests.tiny_models import lora
from tests.tolerances import FP32
from tests.trainers.helpers import own_classifier, rollout
from toolkit.data import doubling
from toolkit.errors import AdapterError, DataError, ModelError
from toolkit.models import ModelSpec, add_lora, load_classifier_weights, load_model
from toolkit.rewards import RewardModel, read_sequences, score_with
from toolkit.trainers.reward import RewardConfig, class_figures, judge_pairs, pair_figures, reward_trainer

COMMON = {
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "learning_rate": 1e-2,
    "logging_steps": 50, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "disable_tqdm": True,
    "max_length": None, "gradient_checkpointing": False,
}  # fmt: skip
PROMPTS = [[1, 11, 12, 13], [1, 20], [1, 30, 31, 32, 33, 34, 35]]
GOOD, BAD = [[5, 2], [21, 22, 5, 2], [5, 2]], [[6, 6, 2], [21, 6, 2], [7, 6, 2]]


def tokenizer_where(same: str | None):
    """The doubling task's tokenizer, with two special tokens in one: "pad eos", or "bos eos" as OPT has it."""
    tokenizer = doubling.tokenizer()
    if same == "pad eos":
        tokenizer.pad_token = tokenizer.eos_token
    elif same == "bos eos":
        tokenizer.eos_token = tokenizer.bos_token
    return tokenizer


def classifier_at(folder, tokenizer, dtype="float32", **settings):
    spec = ModelSpec(str(folder), dtype=dtype, **settings)
    return load_model(spec, "sequence_classifier", tokenizer=tokenizer, num_labels=1, device=torch.device("cpu"))


def data(tokenizer, copies=8):
    """Pairs that end as sampled responses do; with bos == eos the first token is that one, too."""
    end = tokenizer.eos_token_id
    ended = {"chosen_ids": GOOD, "rejected_ids": BAD}
    return Dataset.from_dict(
        {
            name: [[*p, *r[:-1], end] for p, r in zip(PROMPTS, rows, strict=True)] * copies
            for name, rows in ended.items()
        }
    )


def trainer(model, tokenizer, folder, dataset=None, **changes):
    args = RewardConfig(output_dir=str(folder), **{"max_steps": 12, **COMMON, **changes})
    dataset = data(tokenizer) if dataset is None else dataset
    return reward_trainer(args, tokenizer, model, dataset, dataset, callbacks=[])


CASES = [("llama", None), ("llama", "pad eos"), ("opt", "bos eos"), ("opt", "pad eos"), ("bert", None)]


@pytest.mark.parametrize(("kind", "same"), CASES)
def test_ppo_reads_the_ids_and_the_position_of_training(kind, same, tmp_path):
    tokenizer = tokenizer_where(same)
    made = trainer(own_classifier(kind, tokenizer=tokenizer), tokenizer, tmp_path)
    seen: list[list[int]] = []

    def look(module, arguments, inputs):
        rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
        seen.extend([token for token, real in zip(ids, mask, strict=True) if real] for ids, mask in rows)

    hook = made.model.register_forward_pre_hook(look, with_kwargs=True)
    made.train()
    hook.remove()
    trained_on = {tuple(row) for row in seen}
    made.save_model(str(tmp_path))
    # A plain load and forward passes over single rows are the oracle.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    end = tokenizer.eos_token_id
    asked = rollout([[*r[:-1], end] for r in GOOD], PROMPTS)
    rows = [[*p, *r] for p, r in zip(asked.prompt_ids, asked.response_ids, strict=True)]
    assert {tuple(row) for row in rows} <= trained_on
    with torch.no_grad():
        expected = torch.stack([plain(torch.tensor([row])).logits[0, 0] for row in rows])
    seen.clear()
    reward = RewardModel(made.model, tokenizer, reads="tokens", batch_size=2)
    hook = made.model.register_forward_pre_hook(look, with_kwargs=True)
    scores = score_with(reward, asked)
    hook.remove()
    assert sorted(seen) == sorted(rows)
    torch.testing.assert_close(scores, expected, **FP32)
    read = read_sequences(made.model, rows, pad_token_id=tokenizer.pad_token_id, batch_size=2)
    torch.testing.assert_close(read.squeeze(1), expected, **FP32)
    for row, score in zip(rows, scores, strict=True):
        torch.testing.assert_close(score, by_hand(plain, kind, row, same), **FP32)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()


@torch.no_grad()
def by_hand(model, kind, row, same):
    """The head on the state where it is to be read: BERT's first one; a decoder's last, or with pad == eos the one
    before the end; never where the first end of sequence stands."""
    if kind == "bert":
        first = model.bert(torch.tensor([row])).last_hidden_state[0, 0]
        return model.classifier(torch.tanh(model.bert.pooler.dense(first)))[0]
    position = len(row) - (2 if same == "pad eos" else 1)
    return model.score(model.model(torch.tensor([row])).last_hidden_state[0, position])[0]


@pytest.mark.parametrize("adapted", [False, True])
def test_a_loss_at_every_token_is_that_of_a_loop_over_pairs(adapted, tmp_path):
    """With OPT's bos == eos, which stands at position 0, too; read in each unpadded row by itself."""
    tokenizer = tokenizer_where("bos eos")
    model = own_classifier("opt", tokenizer=tokenizer)
    model = add_lora(model, lora()) if adapted else model
    args = RewardConfig(output_dir=str(tmp_path), loss="token_level", **{**COMMON, "max_steps": 2})
    pairs = data(tokenizer, 1)
    made = reward_trainer(args, tokenizer, model, pairs, pairs, callbacks=[])
    model.eval()
    batch = made.data_collator([pairs[i] for i in range(3)])
    loss = made.compute_loss(model, batch)
    inner = model.get_base_model() if adapted else model
    terms = []
    for chosen, rejected in zip(pairs["chosen_ids"], pairs["rejected_ids"], strict=True):
        values = [
            inner.score(inner.model(torch.tensor([row])).last_hidden_state)[0, :, 0] for row in (chosen, rejected)
        ]
        start = next(i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
        steps = range(start, max(len(chosen), len(rejected)))
        held = [[value[min(t, len(value) - 1)] for t in steps] for value in values]
        terms.append(sum(-torch.nn.functional.logsigmoid(a - b) for a, b in zip(*held, strict=True)) / len(steps))
    torch.testing.assert_close(loss, sum(terms) / 3, **FP32)
    made.train()
    with pytest.raises(ModelError, match="loss: token_level reads the head at every token, and that of a Bert"):
        reward_trainer(args, tokenizer, own_classifier("bert"), pairs, callbacks=[])


def test_all_weights_train_as_trl_trains_them(tmp_path):
    tokenizer = doubling.tokenizer()
    start = own_classifier("llama").state_dict()
    made = trainer(own_classifier("llama"), tokenizer, tmp_path, max_steps=3)
    made.train()
    plain = TRLRewardTrainer(
        model=own_classifier("llama"),
        args=RewardConfig(output_dir=str(tmp_path), **{**COMMON, "max_steps": 3}),
        train_dataset=data(tokenizer),
        processing_class=tokenizer,
    )
    plain.train()
    ours, theirs = made.model.state_dict(), plain.model.state_dict()
    assert all(not torch.equal(start[name], ours[name]) for name in ours if "embed" not in name)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6)


def test_classes_and_their_accuracy(tmp_path):
    task = doubling.Doubling()
    labelled = task.labelled("validation")
    made = trainer(
        own_classifier("bert", labels=4, initializer_range=0.02), task.tokenizer, tmp_path, task.labelled("test"),
        max_steps=90, per_device_train_batch_size=32,
    )  # fmt: skip
    assert not isinstance(made, TRLRewardTrainer)
    figures = {"pad_token_id": 0, "batch_size": 64}
    before = class_figures(made.scorer, labelled, **figures)
    made.train()
    after = class_figures(made.scorer, labelled, **figures)
    assert before["accuracy"] < 0.6 and after["accuracy"] > 0.95 and after["loss"] < before["loss"]
    assert made.model.training  # left as it was
    rows = labelled["input_ids"][:5]
    with torch.no_grad():
        alone = torch.stack([made.model.eval()(torch.tensor([row])).logits[0] for row in rows])
    read = read_sequences(made.model, rows, pad_token_id=0, batch_size=5)
    assert read.shape == (5, 4)
    torch.testing.assert_close(read, alone, **FP32)
    with pytest.raises(DataError, match=r"columns chosen_ids and rejected_ids for a head with 1 output"):
        trainer(own_classifier("bert"), task.tokenizer, tmp_path, labelled)


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_a_step_on_classes_is_the_same_however_its_rows_are_divided(architecture, tmp_path):
    task = doubling.Doubling()
    eight = task.labelled("validation").select(range(8))
    dropout = ("classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
    without = dict.fromkeys(dropout, 0.0) if architecture == "bert" else {}

    def step(rows):
        made = trainer(
            own_classifier(architecture, labels=4, **without), task.tokenizer, tmp_path, eight, max_steps=1,
            optim="sgd", learning_rate=0.1, per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows,
            logging_steps=1,
        )  # fmt: skip
        made.train()
        (logged,) = (row for row in made.state.log_history if "loss" in row)
        return [logged["loss"], logged["grad_norm"]], made.model.state_dict()

    (whole, weights), (divided, of_parts) = step(8), step(2)
    assert divided == pytest.approx(whole, rel=1e-3)
    torch.testing.assert_close(of_parts, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_adapter_and_head_alone_and_loads_with_plain_peft(checkpointing, tmp_path):
    base = own_classifier("llama")
    base.save_pretrained(tmp_path / "base")
    tokenizer = doubling.tokenizer()
    tokenizer.save_pretrained(tmp_path / "base")
    own = classifier_at(tmp_path / "base", tokenizer)
    own.config._commit_hash = "abc"  # as of a base from the hub
    model = add_lora(own, lora())
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    made = trainer(model, tokenizer, tmp_path, gradient_checkpointing=checkpointing)
    made.train()
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], weight) for name, weight in frozen.items())
    trained = {name for name, p in named.items() if p.requires_grad}
    assert {name.split(".")[-2] for name in trained if "lora" not in name} == {"default"}
    assert pair_figures(judge_pairs(made.scorer, data(tokenizer), tokenizer, batch_size=8))["accuracy"] == 1.0
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("mine")
    made.save_model(str(tmp_path))
    assert (tmp_path / "model" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "model" / "README.md").read_text() == "mine"
    path = tmp_path / "model" / "adapter_config.json"
    assert json.loads(path.read_text())["revision"] == "abc"
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": None}))  # of a folder there is none
    assert AutoTokenizer.from_pretrained(tmp_path / "model").padding_side == "right"
    rows = data(tokenizer, 1)["chosen_ids"]
    expected = read_sequences(model, rows, pad_token_id=0, batch_size=3)
    plain = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1).eval()
    with torch.no_grad():
        theirs = torch.stack([plain(input_ids=torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(theirs, expected, **FP32)
    again = add_lora(classifier_at(tmp_path / "base", tokenizer), lora())
    load_classifier_weights(again, tmp_path / "model")
    torch.testing.assert_close(read_sequences(again, rows, pad_token_id=0, batch_size=3), expected, **FP32)
    with pytest.raises(AdapterError, match="belongs to another base"):
        load_classifier_weights(add_lora(own_classifier("llama"), lora(r=2)), tmp_path / "model")


@pytest.mark.parametrize("bits", [16, 4])
def test_what_trains_is_float32_on_any_base(bits, tmp_path):
    """TRL casts the trainables of a quantised model to bfloat16, the head among them."""
    tokenizer = doubling.tokenizer()
    own_classifier("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if bits == 4 else None
    loaded = classifier_at(tmp_path / "base", tokenizer, quantization=quantization, dtype="bfloat16")
    packed = [layer for layer in loaded.modules() if isinstance(layer, Linear4bit)]
    for layer in packed:  # as transformers loads it on some CPUs, where a pass without gradients spoils it for others
        layer.support_avx512bf16_for_cpu = True
    model = add_lora(loaded, lora())
    made = trainer(model, tokenizer, tmp_path, bf16=True, max_steps=2)
    assert bool(packed) == (bits == 4) and not any(layer.support_avx512bf16_for_cpu for layer in packed)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before = model.get_base_model().score.modules_to_save["default"].weight.detach().clone()
    made.train()
    assert not torch.equal(before, model.get_base_model().score.modules_to_save["default"].weight)
    rows = data(tokenizer, 1)["chosen_ids"]
    scores = score_with(RewardModel(model, tokenizer, reads="tokens"), rollout(GOOD, PROMPTS))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(input_ids=torch.tensor(rows[:1])).logits.dtype == torch.float32
    # Scores that were bfloat16 on the way would not change by that.
    assert not torch.equal(scores, scores.bfloat16().float())
