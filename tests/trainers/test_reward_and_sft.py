import math
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import SequenceClassifierOutput
from trl import RewardTrainer as TRLRewardTrainer
from trl import SFTConfig
from trl import SFTTrainer as TRLSFTTrainer

from tests.tiny_models import lora, randomize, saved_base, tiny_model
from tests.tolerances import EXACT, FP32
from tests.trainers import resumable
from tests.trainers.helpers import own_classifier
from toolkit.data import doubling
from toolkit.errors import DataError, ToolkitError
from toolkit.models import SharedBase, load_role, sequence_logits
from toolkit.spec.validate import measured_names
from toolkit.trainers import reward, sft
from toolkit.trainers.reward import (
    RewardConfig,
    RewardTrainer,
    class_figures,
    judge_pairs,
    pair_figures,
    reward_trainer,
)
from toolkit.trainers.sft import _loss_of_own_logits, sft_trainer

COMMON = {
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "learning_rate": 1e-2,
    "logging_steps": 5,
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "disable_tqdm": True,
}  # fmt: skip


def pairs(n=32):
    torch.manual_seed(0)
    middles = torch.randint(10, 40, (n, 4)).tolist()
    return Dataset.from_dict(
        {"chosen_ids": [[1, *m, 5, 2] for m in middles], "rejected_ids": [[1, *m, 6, 2] for m in middles]}
    )


def reward_base(labels=1):
    torch.manual_seed(0)
    base = SharedBase(tiny_model())
    base.add_role("reward", lora(), num_labels=labels)
    return base


@pytest.mark.parametrize("checkpointing", [False, True])
def test_scalar_reward_learns_pairs_and_saves_a_role(checkpointing, tmp_path):
    base, tokenizer = reward_base(), doubling.tokenizer()
    args = RewardConfig(
        output_dir=str(tmp_path), max_steps=30, gradient_checkpointing=checkpointing, max_length=None, **COMMON
    )
    base.head("reward").mean_score, base.head("reward").high_score = 1.0, 2.0
    trainer = reward_trainer(args, tokenizer, base, pairs(), pairs(8), callbacks=[], base_name="tiny")
    assert isinstance(trainer, TRLRewardTrainer) and trainer.base_name == "tiny"
    trainer.evaluate()
    assert base.head("reward").high_score == 2.0  # nothing is trained yet
    head = base.heads["reward"].weight.detach().clone()
    trainer.train()
    assert not torch.equal(head, base.heads["reward"].weight)
    assert base.head("reward").mean_score is None and base.head("reward").high_score is None  # of what it gave before
    after = pair_figures(judge_pairs(base, pairs(16), tokenizer, batch_size=8))
    assert after["accuracy"] == 1.0 and after["rows"] == 16 and after["margin"] > 1
    assert after["accuracy_ci"][0] == pytest.approx(0.806, abs=1e-3)  # Wilson, 16 of 16
    with pytest.raises(ToolkitError, match=r"push_to_hub would .* what it makes there: reward\."):
        trainer.push_to_hub()
    trainer.save_model(str(tmp_path / "out"))
    other = SharedBase(tiny_model())
    assert load_role(other, "reward", tmp_path / "out" / "reward")["pad_token_id"] == 0
    for a, b in zip(other.parameters_of("reward"), base.parameters_of("reward"), strict=True):
        assert torch.equal(a, b)


def test_an_adapter_keeps_its_own_dropout_in_the_reward_stage(tmp_path):
    """TRL's disable_dropout, on by default, sets to 0 whatever it finds."""
    base = SharedBase(tiny_model())
    base.add_role("reward", lora(lora_dropout=0.5))
    randomize(base, "reward")
    args = RewardConfig(output_dir=str(tmp_path), max_length=None, gradient_checkpointing=False, **COMMON)
    trainer = reward_trainer(args, doubling.tokenizer(), base, pairs(), callbacks=[])
    assert args.disable_dropout
    model, ids = trainer.model.train(), torch.tensor([pairs(1)["chosen_ids"][0]])
    one, other = (model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for _ in range(2))
    assert not torch.equal(one, other)


def measured(metrics):
    """What a recipe may name as `metric_for_best_model`."""
    return {name.removeprefix("eval_") for name in metrics} - {"epoch", "model_preparation_time"}


def test_an_evaluation_is_of_rows_however_they_stand_in_batches(tmp_path):
    """Of four pairs that are judged wrongly and a fifth that is judged rightly, in batches of four."""
    base, tokenizer = randomize(reward_base(), "reward"), doubling.tokenizer()
    rows, judged = [], judge_pairs(base, pairs(5), tokenizer, batch_size=8)
    for number, (row, pair) in enumerate(zip(pairs(5), judged, strict=True)):
        right, sides = pair["chosen_score"] > pair["rejected_score"], [row["chosen_ids"], row["rejected_ids"]]
        rows.append(sides if right == (number == 4) else sides[::-1])
    held_out = Dataset.from_dict({"chosen_ids": [c for c, _ in rows], "rejected_ids": [r for _, r in rows]})
    args = RewardConfig(output_dir=str(tmp_path), max_length=None, **{**COMMON, "per_device_eval_batch_size": 4})
    trainer = reward_trainer(args, tokenizer, base, pairs(8), held_out, callbacks=[])
    judged = judge_pairs(base, held_out, tokenizer, batch_size=8)
    scores = [pair[f"{side}_score"] for pair in judged for side in ("chosen", "rejected")]
    expected = {name: pair_figures(judged)[name] for name in ("accuracy", "loss", "margin")}
    assert expected["accuracy"] == 0.2
    expected |= {"min_reward": min(scores), "mean_reward": sum(scores) / 10, "max_reward": max(scores)}
    trainer.predict(held_out)  # which logs nothing
    found = trainer.evaluate()
    assert {name: found[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_the_view_trains_as_a_plain_sequence_classifier_would(tmp_path):
    """One step of TRL's trainer on the role view gives the weights that TRL gives a PEFT classifier of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    tokenizer = doubling.tokenizer()
    args = {"output_dir": str(tmp_path), "max_steps": 3, "gradient_checkpointing": False, "max_length": None, **COMMON}
    base = reward_base()
    ours = reward_trainer(RewardConfig(**args), tokenizer, base, pairs(), pairs(), callbacks=[])
    assert measured(ours.evaluate()) == set(measured_names({}, "reward"))
    tiny_model().save_pretrained(tmp_path / "base")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    classifier = get_peft_model(
        classifier, LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear")
    )
    with torch.no_grad():
        theirs = [p for p in classifier.parameters() if p.requires_grad]
        mine = base.parameters_of("reward")
        assert [p.shape for p in theirs] == [p.shape for p in mine]
        for p, q in zip(theirs, mine, strict=True):
            p.copy_(q)
    plain = TRLRewardTrainer(
        model=classifier, args=RewardConfig(**args), train_dataset=pairs(), processing_class=tokenizer
    )
    ours.train()
    plain.train()
    for p, q in zip(theirs, mine, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)


def ragged_pairs():
    rows = [([1, 4, 5, 6, 2], [1, 4, 7, 2]), ([1, 8, 2], [1, 9, 9, 9, 2]), ([1, 4, 4, 2], [1, 4, 2])]
    chosen, rejected = zip(*rows, strict=True)
    return Dataset.from_dict({"chosen_ids": list(chosen), "rejected_ids": list(rejected), "margin": [0.0, 1.0, 0.5]})


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_the_token_level_loss_reads_each_token_of_a_rows_own_sequence(pad_is_eos, tmp_path):
    """Against one unpadded forward pass a sequence, and the definition token by token."""
    base, tokenizer = randomize(reward_base(), "reward"), doubling.tokenizer()
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    args = RewardConfig(
        output_dir=str(tmp_path), loss="token_level", center_rewards_coefficient=0.1, gradient_checkpointing=False,
        max_length=None, **COMMON,
    )  # fmt: skip
    trainer = reward_trainer(args, tokenizer, base, ragged_pairs(), callbacks=[])
    inputs = next(iter(trainer.get_train_dataloader()))
    values = {}
    for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        ids = row[mask.bool()].tolist()
        ids = ids[:-1] if pad_is_eos else ids  # the score is read at the last token that is not padding's
        with torch.no_grad(), base.role("reward"):
            hidden = base.hidden_states(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long))
            values[tuple(ids)] = (ids, base.head("reward")(hidden)[0, :, 0].tolist())
    rows = list(values.values())
    expected, centring = [], []
    for (a, v), (b, w), margin in zip(rows[:3], rows[3:], inputs["margin"].tolist(), strict=True):
        last = max(len(a), len(b)) - 1
        start = next(t for t in range(last + 1) if a[t : t + 1] != b[t : t + 1])
        terms = [math.log1p(math.exp(-(v[min(t, len(v) - 1)] - w[min(t, len(w) - 1)] - margin))) for t in
                 range(start, last + 1)]  # fmt: skip
        expected.append(sum(terms) / len(terms))
        centring.append((v[-1] + w[-1]) ** 2)
    loss = trainer.compute_loss(trainer.model, inputs)
    assert loss.requires_grad
    assert float(loss.detach()) == pytest.approx(sum(expected) / 3 + 0.1 * sum(centring) / 3, abs=1e-5)
    margin = sum(v[-1] - w[-1] for (_, v), (_, w) in zip(rows[:3], rows[3:], strict=True)) / 3
    assert trainer._metrics["train"]["margin"] == [pytest.approx(margin, abs=1e-5)]  # as TRL counts it


def test_margins_reach_trls_loss(tmp_path):
    base, tokenizer = randomize(reward_base(), "reward"), doubling.tokenizer()
    args = RewardConfig(output_dir=str(tmp_path), gradient_checkpointing=False, max_length=None, **COMMON)
    trainer = reward_trainer(args, tokenizer, base, ragged_pairs(), callbacks=[])
    inputs = next(iter(trainer.get_train_dataloader()))
    scores = sequence_logits(base, inputs["input_ids"], inputs["attention_mask"], pad_token_id=0).squeeze(1)
    apart = (scores[:3] - scores[3:] - inputs["margin"]).tolist()
    expected = sum(math.log1p(math.exp(-difference)) for difference in apart) / 3
    assert float(trainer.compute_loss(trainer.model, inputs).detach()) == pytest.approx(expected, abs=1e-5)


def test_some_pairs_of_a_batch_keep_their_own_margins():
    inputs = {"input_ids": torch.arange(6).view(6, 1), "margin": torch.tensor([0.0, 1.0, 2.0])}
    some = RewardTrainer.some_rows(object.__new__(RewardTrainer), inputs, [1, 2])
    assert (some["input_ids"].flatten().tolist(), some["margin"].tolist()) == ([1, 2, 4, 5], [1.0, 2.0])


def test_adapter_and_head_stay_in_float32_on_a_quantised_base(tmp_path):
    """TRL casts what it trains to bfloat16 there, where AdamW's small steps round to nothing."""
    base = saved_base(tmp_path / "base", "auto", compute="bfloat16", double=True)
    base.add_role("reward", lora())
    args = RewardConfig(
        output_dir=str(tmp_path), max_steps=2, gradient_checkpointing=False, max_length=None,
        **{**COMMON, "bf16": True, "learning_rate": 1e-5},
    )  # fmt: skip
    trainer = reward_trainer(args, doubling.tokenizer(), base, pairs(), callbacks=[])
    head = base.head("reward").weight.detach().clone()
    trainer.train()
    assert {p.dtype for p in base.parameters_of("reward")} == {torch.float32}
    moved = (base.head("reward").weight.detach() - head).abs()
    assert bool((moved > 0).all()) and float(moved.max()) < 1e-4  # steps that bfloat16 would have lost


def test_classes_are_trained_by_transformers_trainer(tmp_path):
    task, base = doubling.Doubling(), reward_base(labels=3)
    args = RewardConfig(output_dir=str(tmp_path), max_steps=80, gradient_checkpointing=False, **COMMON)
    labelled = task.labelled("validation")
    before = class_figures(base, labelled, pad_token_id=0, batch_size=64)
    trainer = reward_trainer(args, task.tokenizer, base, task.labelled("test"), labelled, callbacks=[])
    assert not isinstance(trainer, TRLRewardTrainer)
    trainer.train()
    after = class_figures(base, labelled, pad_token_id=0, batch_size=64)
    assert before["accuracy"] < 0.6 and after["accuracy"] > 0.95 and after["loss"] < before["loss"]


def test_noise_on_the_embeddings_reaches_the_reward_stage_and_goes_with_it(tmp_path):
    def losses(alpha):
        base = reward_base()
        values = {**resumable.COMMON, "max_steps": 2, "logging_steps": 1, "save_strategy": "no"}
        args = RewardConfig(output_dir=str(tmp_path / str(alpha)), max_length=None, neftune_noise_alpha=alpha, **values)
        made = reward_trainer(args, doubling.tokenizer(), base, pairs(8), callbacks=[])
        torch.manual_seed(0)
        made.train()
        assert not base.causal_lm.get_input_embeddings()._forward_hooks
        return [line["loss"] for line in made.state.log_history if "loss" in line]

    quiet, noisy = losses(None), losses(20.0)
    assert abs(quiet[0] - noisy[0]) > 1e-3


@pytest.mark.parametrize("kind", ["pairs", "classes"])
def test_a_row_weighs_the_same_in_whatever_micro_batch_it_stands(kind, tmp_path):
    """Of 11 pairs 4, 4 and 3, or 11 times one: a step of a whole pass is the same. So it is of 8 rows as 5 and 3."""

    def trained(rows):
        base, labels = SharedBase(tiny_model()), 1 if kind == "pairs" else 3
        base.add_role("reward", lora(), num_labels=labels)
        data = resumable.rows(resumable.PAIRS, 11) if kind == "pairs" else resumable.rows(resumable.CLASSES, 8)
        args = RewardConfig(
            output_dir=str(tmp_path / str(rows)), max_length=None,
            **{**resumable.COMMON, "optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1, "logging_steps": 1,
               "per_device_train_batch_size": rows, "gradient_accumulation_steps": 12, "save_strategy": "no"},
        )  # fmt: skip
        made = reward_trainer(args, doubling.tokenizer(), randomize(base, "reward"), data, callbacks=[])
        torch.manual_seed(0)
        made.train()
        return made.state.log_history[0]["loss"], [p.detach().clone() for p in base.parameters_of("reward")]

    loss, weights = trained(1)
    other_loss, others = trained(4 if kind == "pairs" else 5)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [resumable.sft_model, resumable.sft_policy], ids=["gpt2", "llama"])
def test_the_loss_of_sft_is_a_mean_over_the_tokens_that_are_predicted(made, tmp_path):
    """Of rows without a prompt the first token is none of them."""
    settings = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 0.0}
    trainer = made(tmp_path, **settings)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad(), nullcontext() if trainer.roles is None else trainer.roles.role("policy"):
        losses = []
        for row in trainer.train_dataset:
            ids = torch.tensor([row["input_ids"]])
            logits = trainer.model(input_ids=ids).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    batches = trainer.get_batch_samples
    seen = []

    def noted(*arguments):
        batch = batches(*arguments)
        seen.extend(ids for part in batch[0] for ids in part["input_ids"].tolist())
        return batch

    trainer.get_batch_samples = noted
    trainer.train()
    places = [trainer.train_dataset["input_ids"].index(ids) for ids in seen]
    expected = float(torch.stack([losses[place] for place in places]).mean())  # rows are of one length
    assert len(places) == 4 and trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("common", "besides"),
    [(0, {}), (8, {}), (9, {}), (0, {"gradient_checkpointing": True}), (0, {"neftune_noise_alpha": 5.0})],
)
def test_rows_of_sft_are_packed_and_learnt_as_padded_ones(common, besides, tmp_path, monkeypatch):
    """As by TRL's own pass over padded rows under their mask, and so without a mask where nothing is packed, as with
    noise (which comes with a run).

    Args:
        common: tokens that begin every prompt, of nine of which 8 are read once; of 8 none, as the first token of a
            loss follows one of its own row.
    """
    rows = [[1, 5, 6, 2], [9, 8, 7, 6, 5, 4, 3, 2, 1], [4, 2], [7, 11, 12, 13, 2]]
    labels = [[-100, *row[1:]] for row in rows[:3]] + [rows[3]]
    rows, labels = ([[token] * common + of_row for of_row in of] for token, of in ((14, rows), (-100, labels)))
    data = Dataset.from_dict({"input_ids": rows, "labels": labels})
    args = SFTConfig(
        output_dir=str(tmp_path), max_length=None, dataset_kwargs={"skip_prepare_dataset": True},
        **COMMON, **{"gradient_checkpointing": False, **besides},
    )  # fmt: skip
    found = []
    for packs, masked in ((True, False), (False, False), (False, True)):
        if masked:
            monkeypatch.setattr(sft, "_without_mask", lambda inputs: (inputs, 0))
        base = SharedBase(tiny_model())
        base.add_role("policy", lora())
        randomize(base, "policy")
        trainer = sft_trainer(args, doubling.tokenizer(), base, data, callbacks=[])
        base._packs_rows &= packs
        read, states = [], base.causal_lm.base_model.forward
        monkeypatch.setattr(
            base.causal_lm.base_model,
            "forward",
            lambda *of, _s=states, _r=read, **named: _r.append(named) or _s(*of, **named),
        )
        trainer.model.train()
        with base.role("policy"):
            loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(data)))
            loss.backward()
        packs &= (
            "neftune_noise_alpha" not in besides and args.loss_type == "chunked_nll"
        )  # later TRLs have it in another form, and pad
        assert read[0]["input_ids"].shape == ((1, {0: 24, 8: 56, 9: 32}[common]) if packs else (4, 9 + common))
        assert read[0]["attention_mask"].all() != masked
        found.append([loss.detach(), *(p.grad for p in base.parameters_of("policy")), trainer.trl_metrics()])
    *others, (*padded, expected) = found
    assert expected["num_tokens"] == [20 + 4 * common]
    for *ours, metrics in others:
        assert metrics == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
        for one, other in zip(ours, padded, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rows_that_trl_has_packed_are_not_packed_again(tmp_path):
    rows = [[1, 5, 6, 2], [9, 8, 7, 6, 2], [4, 11, 2]]
    settings = {**COMMON, "max_length": 16, "packing": True, "gradient_checkpointing": False}
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    randomize(base, "policy")
    data, args = Dataset.from_dict({"input_ids": rows}), SFTConfig(output_dir=str(tmp_path), **settings)
    trainer = sft_trainer(args, doubling.tokenizer(), base, data, callbacks=[])
    (inputs,) = trainer.get_train_dataloader()
    assert inputs["input_ids"].shape == (1, 12)
    with torch.no_grad(), base.role("policy"):
        losses = []
        for ids in map(torch.tensor, rows):
            logits = base.causal_lm(input_ids=ids.unsqueeze(0)).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
        found = float(trainer.compute_loss(trainer.model, inputs))
    assert found == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4)
    prompts_alone = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}  # as packed parts of long ones
    assert float(trainer.compute_loss(trainer.model, prompts_alone, num_items_in_batch=torch.tensor(0))) == 0.0


def test_the_loss_of_own_logits_is_divided_by_the_tokens_of_the_whole_step():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 7, generator=generator)
    labels = torch.tensor([[-100, 3, 6, 1], [2, -100, 5, -100]])
    given = [(0, 1, 3), (0, 2, 6), (0, 3, 1), (1, 2, 5)]  # by row and place, each told by the place before
    total = -sum(logits[row, place - 1].log_softmax(-1)[token] for row, place, token in given)
    outputs = SequenceClassifierOutput(logits=logits)
    for number in (20, None):
        found = _loss_of_own_logits(outputs, labels, number and torch.tensor(number))
        torch.testing.assert_close(found, total / (number or len(given)), **FP32)


def test_a_pair_is_as_long_as_it_is(tmp_path):
    """TRL's own default leaves out one of 1,025 tokens, of those to train on and of those held out."""
    long = Dataset.from_dict({"chosen_ids": [[1, *[5] * 1023, 2], [1, 5, 2]], "rejected_ids": [[1, 6, 2]] * 2})
    args = RewardConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **COMMON)
    trainer = reward_trainer(args, doubling.tokenizer(), reward_base(), long, long, callbacks=[])
    assert [len(trainer.train_dataset), len(trainer.eval_dataset)] == [2, 2]


def test_columns_must_fit_the_head(tmp_path):
    args = RewardConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **COMMON)
    with pytest.raises(
        DataError, match=r"columns input_ids and labels for a head with 3 output\(s\); present: chosen_ids"
    ):
        reward_trainer(args, doubling.tokenizer(), reward_base(3), pairs())


def sequences(n=64):
    return Dataset.from_dict({"input_ids": [[1, 5, 6, 7, 8, 2]] * n, "labels": [[-100, -100, 6, 7, 8, 2]] * n})


@pytest.mark.filterwarnings("ignore:.return_outputs=True.*are deprecated")  # TRL's, of what `predict` asks for
def test_an_evaluation_has_all_rows_where_training_drops_a_batch_that_is_not_full(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), dataloader_drop_last=True, **COMMON)
    trainer = sft_trainer(args, doubling.tokenizer(), tiny_model("gpt2"), sequences(12), sequences(5), callbacks=[])
    losses = [trainer.evaluate()["eval_loss"], trainer.predict(trainer.eval_dataset).metrics["test_loss"]]
    assert len(trainer.get_train_dataloader()) == 1
    trainer.args.dataloader_drop_last = False
    assert losses == [trainer.evaluate()["eval_loss"]] * 2
    assert trainer.evaluate(trainer.eval_dataset.to_iterable_dataset())["eval_loss"] == pytest.approx(losses[0])


@pytest.mark.filterwarnings("ignore:.return_outputs=True.*are deprecated")  # TRL's, of what `predict` asks for
@pytest.mark.parametrize("shared", [False, True])
def test_held_out_figures_are_means_over_tokens_whatever_the_batches_are(shared, tmp_path):
    """Responses of 1, 2 and 9 tokens, the last one greedy: by means of rows, batches of 2 would have another loss."""
    base, prompt, rows = SharedBase(tiny_model()) if shared else tiny_model("gpt2"), [1, 5, 6, 7], [[2], [30, 2], []]
    if shared:
        base.add_role("policy", lora())
        randomize(base, "policy")
    model, loss, entropy, right = (base.causal_lm if shared else base).eval(), 0.0, 0.0, 0
    with torch.no_grad(), base.role("policy") if shared else nullcontext():
        for _ in range(9):
            rows[2].append(int(model(torch.tensor([prompt + rows[2]])).logits[0, -1].argmax()))
        for row in rows:
            logprobs = model(torch.tensor([prompt + row])).logits[0, 3:-1].log_softmax(-1)
            loss -= float(logprobs[range(len(row)), row].sum())
            entropy -= float((logprobs.exp() * logprobs).sum())
            right += int((logprobs.argmax(-1) == torch.tensor(row)).sum())
    held_out = {"input_ids": [prompt + row for row in rows], "labels": [[-100] * 4 + row for row in rows]}
    expected = {"eval_loss": loss / 12, "eval_entropy": entropy / 12, "eval_mean_token_accuracy": right / 12}
    for size in (1, 2, 3):
        settings = {**COMMON, "per_device_eval_batch_size": size, "gradient_checkpointing": False}
        args, data = SFTConfig(output_dir=str(tmp_path), **settings), Dataset.from_dict(held_out)
        trainer = sft_trainer(args, doubling.tokenizer(), base, data, data, callbacks=[])
        found = trainer.evaluate() | trainer.state.log_history[-1]
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(loss / 12, rel=1e-4)


@pytest.mark.parametrize("left_out", [True, False])
def test_a_held_out_loss_that_is_no_number_is_left_out_by_transformers_setting(left_out, tmp_path):
    settings = {**COMMON, "per_device_eval_batch_size": 1, "logging_nan_inf_filter": left_out}
    args = SFTConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **settings)
    trainer = sft_trainer(args, doubling.tokenizer(), tiny_model("gpt2"), sequences(8), sequences(3), callbacks=[])
    losses = iter([2.0, math.nan, 5.0])

    def loss(*_, return_outputs=False, **__):
        found = torch.tensor(next(losses))
        return (found, SequenceClassifierOutput()) if return_outputs else found

    trainer.compute_loss = loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(3.5 if left_out else math.nan, nan_ok=True)


def test_a_row_past_the_positions_of_the_model_is_refused(tmp_path):
    """In the data to measure on, too; of RoBERTa's positions one is passed over, and one is that of padding."""
    long, made = [1, *[5] * 63, 2], {"output_dir": str(tmp_path), **COMMON, "gradient_checkpointing": False}
    rows = Dataset.from_dict({"input_ids": [[1, 5, 2], long], "labels": [[1, 5, 2], long]})
    both = Dataset.from_dict({"chosen_ids": [[1, 5, 2]] * 2, "rejected_ids": [[1, 6, 2], long[:64]]})
    tokenizer, gpt2 = doubling.tokenizer(), tiny_model("gpt2")
    with pytest.raises(DataError, match=r"^row 1 of the held-out rows has 65 tokens, and the model has positions for "
                       r"64\. Set max_length of sft to 64, or leave longer rows out\.$"):  # fmt: skip
        sft_trainer(SFTConfig(max_length=None, **made), tokenizer, gpt2, sequences(2), rows)
    packed = {"max_length": 64, "packing": True}
    for cut in ({"max_length": 64}, {**packed, "packing_strategy": "wrapped"}):
        sft_trainer(SFTConfig(**{**made, **cut}), tokenizer, gpt2, rows, rows)
    with pytest.raises(DataError, match="^row 0 of the training rows has 66 tokens"):  # positions go on over the rows
        wrapped = {**packed, "packing_strategy": "wrapped", "max_length": 66}
        sft_trainer(SFTConfig(**{**made, **wrapped}), tokenizer, gpt2, rows)
    two = Dataset.from_dict({"input_ids": [long[:40]] * 2, "labels": [long[:40]] * 2})
    by_row = SFTConfig(**{**made, **packed, "max_length": 128})  # bfd: each row has positions of its own
    assert len(sft_trainer(by_row, tokenizer, gpt2, two).train_dataset) == 1
    with pytest.raises(DataError, match="^row 0 of the training rows has 65 tokens"):
        sft_trainer(by_row, tokenizer, gpt2, rows)
    with pytest.raises(DataError, match="has 65 tokens"):  # a table under an adapter
        adapted = get_peft_model(
            tiny_model("gpt2"), LoraConfig(target_modules=["wpe", "c_attn"], task_type="CAUSAL_LM")
        )
        sft_trainer(SFTConfig(max_length=None, **made), tokenizer, adapted, rows)
    llama = tiny_model()  # whose rotary positions are no table: longer rows are trained
    llama.config.max_position_embeddings = 64
    sft_trainer(SFTConfig(max_length=None, **made), tokenizer, llama, rows)
    roberta = own_classifier("bert", model_type="roberta")
    with pytest.raises(DataError, match=r"^row 1 of the training rows has 64 tokens, .* 63\. Shorten the limits of"):
        reward_trainer(RewardConfig(max_length=None, **made), tokenizer, roberta, both)


def test_pretraining_trains_all_weights_and_saves_a_checkpoint(tmp_path):
    model = tiny_model("gpt2").requires_grad_(True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    args = SFTConfig(output_dir=str(tmp_path), max_steps=20, gradient_checkpointing=False, **COMMON)
    trainer = sft_trainer(args, doubling.tokenizer(), model, sequences(), sequences(8), callbacks=[])
    assert isinstance(trainer, TRLSFTTrainer)
    metrics = trainer.evaluate()
    assert measured(metrics) == set(measured_names({}, "sft"))
    first = metrics["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.2 * first
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    trainer.save_model(str(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[1, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits, **EXACT)


@pytest.mark.filterwarnings("ignore:.return_outputs=True.*are deprecated")  # TRL's, of what `predict` asks for
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_of_an_adapter_trains_the_policy_alone(checkpointing, tmp_path):
    torch.manual_seed(0)
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    frozen = {n: p.detach().clone() for n, p in base.named_parameters() if ".policy." not in n}
    args = SFTConfig(output_dir=str(tmp_path), max_steps=20, gradient_checkpointing=checkpointing, **COMMON)
    trainer = sft_trainer(args, doubling.tokenizer(), base, sequences(), sequences(8), callbacks=[])
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    assert last < 0.5 * first
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(last)
    assert all(torch.equal(p, frozen[n]) for n, p in base.named_parameters() if n in frozen)
    trainer.save_model(str(tmp_path))
    plain = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "policy"))
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad(), base.role("policy"), base.in_eval_mode():
        torch.testing.assert_close(plain(input_ids=ids).logits, base(input_ids=ids).logits, **FP32)


def test_a_trainer_trains_its_own_role_though_another_one_was_made_since(tmp_path):
    base, tokenizer = reward_base(), doubling.tokenizer()
    base.add_role("policy", lora())
    settings = {"output_dir": str(tmp_path), "max_steps": 1, "gradient_checkpointing": False, **COMMON}
    made = {"policy": sft_trainer(SFTConfig(**settings), tokenizer, base, sequences(), callbacks=[])}
    made["reward"] = reward_trainer(RewardConfig(**settings), tokenizer, base, pairs(), callbacks=[])
    for role, other in (("policy", "reward"), ("reward", "policy")):
        before = {name: [p.detach().clone() for p in base.parameters_of(name)] for name in made}
        made[role].train()
        assert not all(map(torch.equal, before[role], base.parameters_of(role))), role
        assert all(map(torch.equal, before[other], base.parameters_of(other))), role


def test_the_policys_adapter_stays_in_float32_on_a_quantised_base(tmp_path):
    base = saved_base(tmp_path / "base", "auto", compute="bfloat16", double=True)
    base.add_role("policy", lora())
    changes = {**COMMON, "bf16": True, "learning_rate": 1e-5}
    args = SFTConfig(output_dir=str(tmp_path), max_steps=2, gradient_checkpointing=False, **changes)
    randomize(base, "policy")
    before = [p.detach().clone() for p in base.parameters_of("policy")]
    trainer = sft_trainer(args, doubling.tokenizer(), base, sequences(), callbacks=[])
    assert all(map(torch.equal, before, base.parameters_of("policy")))  # to digits that TRL's bfloat16 has not
    assert {p.dtype for p in base.parameters_of("policy")} == {torch.float32}
    trainer.train()
    assert {p.dtype for p in base.parameters_of("policy")} == {torch.float32}


def test_figures_of_classes_are_means_over_rows(monkeypatch):
    """The right class has a probability of 3/4, 1/4 and 1/2."""
    logits = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)], [0.0, 0.0]])
    monkeypatch.setattr(reward, "read_sequences", lambda *_, **__: logits)
    rows = Dataset.from_dict({"input_ids": [[1], [1], [1]], "labels": [0, 0, 1]})
    found = class_figures(None, rows, pad_token_id=0, batch_size=3)
    assert found["loss"] == pytest.approx((math.log(4 / 3) + math.log(4) + math.log(2)) / 3)
    assert found["accuracy"] == pytest.approx(1 / 3) and found["rows"] == 3


def test_the_prompt_of_a_pair_is_what_both_begin_with(monkeypatch):
    """Where no column says how long it is; what they have in common later on is none of it."""
    monkeypatch.setattr(reward, "read_sequences", lambda _, ids, **__: torch.zeros(len(ids), 1))
    tokenizer = doubling.tokenizer()
    held_out = Dataset.from_dict({"chosen_ids": [[1, 8, 9, 10, 2], [5, 2]], "rejected_ids": [[1, 8, 7, 10], [6, 2]]})
    found = judge_pairs(None, held_out, tokenizer, batch_size=2)
    assert [pair["prompt"] for pair in found] == [tokenizer.decode([1, 8]), ""]
    assert [(pair["chosen_length"], pair["rejected_length"]) for pair in found] == [(3, 2), (2, 2)]
    assert found[0]["chosen"] == tokenizer.decode([9, 10]) and found[0]["rejected"] == tokenizer.decode([7, 10])


def test_a_tie_counts_as_wrong():
    pair = {"prompt": "", "chosen": "a", "rejected": "b", "chosen_score": 1.0, "rejected_score": 1.0}
    pair |= {"chosen_length": 1, "rejected_length": 1}
    assert pair_figures([pair] * 3 + [{**pair, "chosen_score": 2.0}])["accuracy"] == 0.25


@pytest.mark.parametrize("on", [False, True])
def test_layers_of_the_reward_role_are_computed_again_where_checkpointing_is_asked_for(on, tmp_path):
    base, passes = reward_base(), []
    counted = base.causal_lm.model.layers[0].self_attn  # with gradients, which the trial of packed rows has not
    counted.register_forward_pre_hook(lambda *_: passes.append(1) if torch.is_grad_enabled() else None)
    args = RewardConfig(output_dir=str(tmp_path), max_steps=1, gradient_checkpointing=on, max_length=None, **COMMON)
    reward_trainer(args, doubling.tokenizer(), base, pairs(8), callbacks=[]).train()
    assert len(passes) == 1 + on


@pytest.mark.parametrize("on", [False, True])
def test_rows_of_sft_are_padded_where_checkpointed_layers_would_lose_them(on, tmp_path):
    def without_lengths(module, given, named):
        return given, {name: value for name, value in named.items() if not (name == "row_lengths" and module.training)}

    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    for layer in base.causal_lm.model.layers:
        layer.register_forward_pre_hook(without_lengths, with_kwargs=True)
    data = Dataset.from_dict({"input_ids": [[1, 5, 6, 2], [4, 2]]})
    skip = {"skip_prepare_dataset": True}
    args = SFTConfig(
        output_dir=str(tmp_path), max_length=None, dataset_kwargs=skip, gradient_checkpointing=on, **COMMON
    )
    sft_trainer(args, doubling.tokenizer(), base, data, callbacks=[])
    assert base.packs_rows == (not on)


def test_the_token_level_loss_reads_the_model_that_it_is_given(tmp_path):
    """Which `torch_compile` wraps."""
    args = RewardConfig(
        output_dir=str(tmp_path), loss="token_level", gradient_checkpointing=False, max_length=None, **COMMON
    )
    made, called = reward_trainer(args, doubling.tokenizer(), reward_base(), pairs(4), callbacks=[]), []

    def wrapped(**named):
        called.append(named)
        return made.model(**named)

    made.compute_loss(wrapped, made.data_collator(list(made.train_dataset)))
    assert len(called) == 1
