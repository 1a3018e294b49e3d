"""What limits a response, and how it is decoded."""

import itertools

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.tiny_models import SPECIAL, lora, shared_base, tiny_model
from tests.tiny_runs import llama2_tokenizer
from tests.trainers.helpers import PROMPTS
from toolkit.data import concatenate, doubling, select
from toolkit.errors import DataError, ToolkitError
from toolkit.functional import inverse_cdf
from toolkit.models import SharedBase, ValueModel
from toolkit.sampling import Sampler, check_room
from toolkit.sampling.sampler import rollout_of, uniforms

ROWS = [{"input_ids": ids, "number": i} for i, ids in enumerate(PROMPTS)]  # of 4, 6, 3 and 5 tokens


def sampler(**settings):
    return Sampler(shared_base(), doubling.tokenizer(), **{"response_length": 6, **settings})


def respond(made, seed=0):
    torch.manual_seed(seed)
    return made(made.collator(ROWS))


def test_a_response_ends_at_its_length_or_with_its_prompt_at_the_maximum():
    limited = respond(sampler(response_length=4, max_length=8))
    assert all(len(r) <= limit for r, limit in zip(limited.response_ids, (4, 2, 4, 3), strict=True))
    assert not all(limited.ended) and limited.columns == {"number": [0, 1, 2, 3]}
    free = respond(sampler(response_length=4))
    for ids, whole in zip(limited.response_ids, free.response_ids, strict=True):  # cut, and not another response
        assert whole[: len(ids)] == ids
    with pytest.raises(DataError, match="max_length: a prompt has 6 tokens, and 6 leaves no room for a response"):
        respond(sampler(max_length=6))


def test_a_prompt_with_a_token_that_the_base_does_not_know_is_an_error():
    made = sampler()
    made.tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    row = {**ROWS[1], "input_ids": made.tokenizer.encode("<image_soft_token>")}
    with pytest.raises(
        DataError, match='the token "<image_soft_token>" of id 42, and .* embeddings for 0 to 41. Leave'
    ):
        made(made.collator([ROWS[0], row]))


def test_the_positions_of_the_base_limit_a_response_too():
    made = sampler(response_length=100)  # 64 positions; prompts of 3 to 6 tokens
    for row, ids in zip(ROWS, respond(made).response_ids, strict=True):
        assert len(row["input_ids"]) + len(ids) <= 64
    with pytest.raises(DataError, match="a prompt has 64 tokens, and the base has positions for 64. Shorten"):
        made(made.collator([{**ROWS[0], "input_ids": [3] * 64}]))


# The last ones have a table of attention by width, padding included.
@pytest.mark.parametrize("architecture", ["gpt2", "opt", "llama", "gpt_neo", "openai-gpt", "mpt"])
def test_a_long_prompt_beside_a_short_one_does_not_run_past_the_positions(architecture):
    base = SharedBase(tiny_architecture(architecture))
    base.add_role("reference")
    made = Sampler(base, doubling.tokenizer(), role="reference", response_length=40)
    rows = [{"input_ids": [1, *[11] * 61]}, {"input_ids": [1, *[12] * 9]}]  # of 64
    both = made(made.collator(rows), keys=torch.tensor([1, 2]))
    (alone,) = made(made.collator(rows[1:]), keys=torch.tensor([2])).response_ids
    assert len(both.response_ids[0]) <= 2 < len(alone) and both.response_ids[1] == alone


def test_positions_of_longrope_are_those_with_one_set_of_angles():
    """Past them a pass has other angles for all of its rows once the longest is there."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    base = SharedBase(tiny_architecture("phi3", original_max_position_embeddings=16, rope_parameters=rope))
    base.add_role("reference")
    made = Sampler(base, doubling.tokenizer(), role="reference", response_length=40)
    found = made(made.collator(ROWS), keys=torch.arange(4)).response_ids
    assert base.positions == (16, "the base") and all(
        len(p) + len(r) <= 16 for p, r in zip(PROMPTS, found, strict=True)
    )
    assert base.padding_takes_positions  # transformers drops the cache of a batch that is as wide


def test_the_positions_of_a_value_model_limit_a_response_as_well():
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, num_labels=1, **SPECIAL)
    base = SharedBase(tiny_model("gpt2"))
    base.add_role("policy", lora())
    base.add_role("reference")
    base.place_value(ValueModel(GPT2ForSequenceClassification(config), None))
    made = Sampler(base, doubling.tokenizer(), response_length=40)
    for row, ids in zip(ROWS, respond(made).response_ids, strict=True):
        assert len(row["input_ids"]) + len(ids) <= 8
    with pytest.raises(DataError, match="a prompt has 9 tokens, and the value model has positions for 8. Shorten"):
        made(made.collator([{"input_ids": [3] * 9}]))


def test_text_of_a_prompt_and_its_response_together_has_the_space_that_decoding_alone_drops():
    tokenizer, prompt, ids = llama2_tokenizer(), [1, 3, 4, 5], [[6, 7, 2], [7, 2], [2], []]
    batch = {"prompt_ids": [prompt] * 4, "columns": {"number": [0, 1, 2, 3]}}
    found = rollout_of(batch, ids, tokenizer=tokenizer, stop_token_ids=[2], limits=[3] * 4)
    assert found.responses == ["reddish", "dish", "", ""]  # as a text that is tokenised alone
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.batch_decode([prompt + row for row in ids], skip_special_tokens=True)
    assert [before + after for after in found.continuations] == whole
    assert whole[:2] == ["Name a colour reddish", "Name a colourdish"]
    assert select(concatenate([found, found]), [1, 4]).continuations == ["dish", " reddish"]
    plain = respond(sampler())
    assert plain.continuations == plain.responses


def test_room_is_asked_of_the_longest_prompt():
    check_room([3, 5], 6)
    check_room([3, 500], None)
    check_room([], 1)
    with pytest.raises(DataError, match="Shorten the prompts to 5 tokens or less, or raise it") as error:
        check_room([3, 6], 6)
    assert error.value.problems[0].field == "max_length"
    check_room([3, 5], 8, fewest=3)
    with pytest.raises(DataError, match="8 leaves no room for a response of 4 tokens, which is min_.* to 4 tokens or"):
        check_room([3, 5], 8, fewest=4)


def test_the_temperature_widens_and_none_is_greedy():
    greedy = respond(sampler(temperature=None))
    assert respond(sampler(temperature=None), seed=1).response_ids == greedy.response_ids
    assert respond(sampler(temperature=1e-4), seed=1).response_ids == greedy.response_ids
    wide = [respond(sampler(temperature=5.0), seed=seed).response_ids for seed in (0, 0, 1)]
    assert wide[0] == wide[1] != wide[2]


def test_each_role_responds_for_itself():
    policy = sampler(temperature=None)
    assert policy.reference.role == "reference" and policy.reference.temperature is None
    assert respond(policy).response_ids != respond(policy.reference).response_ids
    assert policy.roles.active_role is None
    by_q = sampler(role="q", temperature=0.1)
    assert by_q.reference.temperature == 1.0  # τ is of Q, not of the reference


def test_the_precision_is_that_which_is_given():
    for given in ({"autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}, {}):
        seen, made = [], sampler(response_length=1, **given)
        made.roles.lm_head.register_forward_hook(lambda *_, seen=seen: seen.append(torch.is_autocast_enabled("cpu")))
        respond(made)
        assert seen == [bool(given)] * len(seen) != []


def test_a_row_is_sampled_by_its_key_whatever_stands_beside_it():
    made = sampler(temperature=2.0)
    keys = torch.tensor([11, 12, 13, 14])
    whole = made(made.collator(ROWS), keys=keys).response_ids
    assert whole != made(made.collator(ROWS), keys=keys + 10).response_ids
    halves = [made(made.collator([ROWS[i] for i in rows]), keys=keys[rows]).response_ids for rows in ([3, 1], [0, 2])]
    assert [*halves[0], *halves[1]] == [whole[i] for i in (3, 1, 0, 2)]
    twice = made(made.collator([ROWS[0]] * 8), keys=torch.arange(8)).response_ids
    assert len({tuple(ids) for ids in twice}) > 1  # a prompt alone does not say what its response is


@pytest.mark.parametrize("temperature", [1.0, None])
def test_what_cannot_be_sampled_is_an_error(temperature):
    made = sampler(temperature=temperature)
    with torch.no_grad():
        made.roles.parameters_of("policy")[1].fill_(float("nan"))
    with pytest.raises(ToolkitError, match='logits of the role "policy" are not finite'):
        respond(made)


def test_what_a_row_would_say_after_its_end_may_be_anything(monkeypatch):
    made, calls = sampler(response_length=4, max_length=8), itertools.count()
    whole = respond(made, seed=2)  # in which no row leaves

    def drawn(scores, *arguments, **named):
        tokens, probabilities = inverse_cdf(scores, *arguments, **named)
        if next(calls) >= 2:  # the second prompt has room for two tokens
            assert len(probabilities) == 4
            probabilities[1] = float("nan")
        return tokens, probabilities

    monkeypatch.setattr("toolkit.sampling.sampler.inverse_cdf", drawn)
    assert respond(made, seed=2) == whole and next(calls) == 4


def test_numbers_are_uniform_and_of_their_key_alone():
    numbers = uniforms(torch.arange(400), 500)
    assert numbers.shape == (400, 500) and numbers.dtype is torch.float64
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    # 200,000 numbers: the standard error of a decile's share is 0.0007, of a correlation 0.0022.
    assert (numbers.histogram(10, range=(0.0, 1.0)).hist / numbers.numel() - 0.1).abs().max() < 0.003
    for one, other in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.009
    assert torch.equal(uniforms(torch.tensor([7, 3]), 20), numbers[[7, 3], :20])
    largest = torch.tensor([2**63 - 1])
    assert not torch.equal(uniforms(largest, 4), uniforms(largest - 1, 4))


@pytest.mark.parametrize("temperature", [0.8, None])
def test_memory_that_runs_out_halves_the_rows_that_are_generated_at_a_time(temperature, monkeypatch, caplog):
    """The responses are those of one pass: each row draws by a key of its own."""
    whole, ours = respond(sampler(temperature=temperature)), sampler(temperature=temperature)
    generate, sizes = type(ours.roles).generate, []

    def limited(self, ids, *arguments, **named):
        sizes.append(len(ids))
        if len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(self, ids, *arguments, **named)

    monkeypatch.setattr(type(ours.roles), "generate", limited)
    found = respond(ours)
    assert found.response_ids == whole.response_ids and found.ended == whole.ended
    assert sizes == [4, 2, 1, 1, 1, 1] and ours.portion.rows == 1
    respond(ours)
    assert sizes[6:] == [1, 1, 1, 1]  # it stays so
    assert sum("generated at a time is" in text for text in caplog.messages) == 2
