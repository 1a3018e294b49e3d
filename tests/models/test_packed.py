"""Rows one after the other in a line, against the same rows by themselves."""

from itertools import product

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.tiny_models import saved_base, shared_base, tiny_model
from tests.trainers.helpers import own_classifier
from toolkit.data import pad_rows
from toolkit.errors import ModelError
from toolkit.models import (
    CACHE,
    Sequences,
    SharedBase,
    ValueModel,
    response_logprobs,
    sequence_logits,
    value_after_response,
)

PROMPTS = [[1, 4, 9], [1, 30, 31, 32, 33], [8], [5, 6]]
RESPONSES = [[12, 13, 2], [20, 21, 22, 23, 24, 2], [7, 7, 7, 2], [3]]


def packed():
    return Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0, pack=True)


def test_a_line_of_rows():
    """6, 11, 5 and 3 tokens, 25 rounded up to 32; a row a line would be 4 times 16."""
    sequences, positions = packed(), [*range(6), *range(11), *range(5), *range(3), *[2] * 7]
    assert sequences.packed and sequences.input_ids.shape == (1, 32)
    assert sequences.row_lengths == [6, 11, 5, 3, 7] and sequences.position_ids.tolist() == [positions]
    assert sequences.starts.tolist() == [0, 6, 17, 22]
    lines, places = (of.tolist() for of in sequences.predicting)
    assert lines == [0] * 14 and places == [2, 3, 4, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 23]
    assert sequences.response_tokens.tolist() == [token for response in RESPONSES for token in response]


def test_rows_are_packed_where_it_is_asked_for():
    of_8 = [[1, 2]] * 4, [[3] * 6] * 4
    assert Sequences.from_ids(*of_8, pad_token_id=0, pack=True).input_ids.shape == (1, 32)  # nothing is padded
    assert not Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0).packed
    long = [[1] * 500, [2] * 260], [[2] * 4] * 2
    sequences = Sequences.from_ids(*long, pad_token_id=0, pack=True)
    assert sequences.input_ids.shape == (1, 768)  # a multiple of 32, the power of two up to a sixteenth


BEGINNING = [20, 21, 22, 23, 24, 25, 26, 27, 28]  # of which 8 tokens are shared
BEGUN = [BEGINNING + prompt for prompt in PROMPTS]


def begun():
    return Sequences.from_ids(BEGUN, RESPONSES, pad_token_id=0, pack=True)


def test_what_all_prompts_begin_with_stands_in_the_line_once():
    """15, 20, 14 and 12 tokens, of which the last three rows have 12, 6 and 4 of their own: 37 rounded up to 40."""
    sequences = begun()
    own = [*BEGUN[0], *RESPONSES[0]], *([*p[8:], *r] for p, r in zip(BEGUN[1:], RESPONSES[1:], strict=True))
    assert sequences.input_ids.tolist() == [[token for row in own for token in row] + [0] * 3]
    assert sequences.common_length == 8 and sequences.row_lengths == [15, 12, 6, 4, 3]
    positions = [*range(15), *range(8, 20), *range(8, 14), *range(8, 12), 11, 11, 11]
    assert sequences.position_ids.tolist() == [positions]
    assert sequences.own_starts.tolist() == [0, 15, 27, 33]
    assert sequences.predicting[1].tolist() == [11, 12, 13, 20, 21, 22, 23, 24, 25, 28, 29, 30, 31, 35]
    assert sequences.response_tokens.tolist() == [token for response in RESPONSES for token in response]
    assert sequences.places(torch.tensor([0, 7, 8])).tolist() == [[0, 7, 8], [0, 7, 15], [0, 7, 27], [0, 7, 33]]


def test_each_row_has_the_last_token_of_its_prompt_and_few_tokens_are_not_shared():
    def common(*prompts):
        rows = list(prompts), [[3, 2]] * len(prompts)
        assert Sequences.from_ids(*rows, pad_token_id=0).common_length == 0  # rows that are not packed
        return Sequences.from_ids(*rows, pad_token_id=0, pack=True).common_length

    assert common([1] * 16, [1] * 16) == 8 and common([1] * 17, [1] * 20) == 16
    assert common([1] * 7 + [4] * 9, [1] * 7 + [5] * 9) == common([1] * 8, [1] * 20) == common([1] * 20) == 0


_WINDOWS = {
    "mistral": {"sliding_window": 4}, "gemma3_text": {"sliding_window": 4}, "doge": {"keep_window_size": 12},
    "deepseek_v32": {"index_topk": 12},
}  # fmt: skip


# Full attention, windows shorter than a row, both in turn, learned positions. Doge keeps so many keys of a whole line,
# by a mask of numbers, and DeepSeek-V3.2 by one of True and False: they would keep all of the trial's few tokens, and
# not all of these rows.
PACKED = ["llama", "mistral", "gemma3_text", "qwen3", "gpt2", "opt"]


@pytest.mark.parametrize(
    ("kind", "common"), [*product(PACKED, [False, True]), ("doge", False), ("deepseek_v32", False)]
)
def test_packed_rows_say_what_they_say_alone(kind, common):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    try:
        base = SharedBase(tiny_architecture(kind, **_WINDOWS.get(kind, {})))
    except ModelError:
        if kind != "doge":
            raise
        pytest.skip(f"with this transformers and torch {kind} reads both ways by SDPA")
    base.add_role("reference")
    assert base.packs_rows == (kind not in ("doge", "deepseek_v32"))
    prompts = BEGUN if common else PROMPTS
    sequences = Sequences.from_ids(prompts, RESPONSES, pad_token_id=0, pack=base.packs_rows)
    with torch.no_grad(), base.role("reference"):
        found = response_logprobs(base, sequences)
        for row, (prompt, response) in enumerate(zip(prompts, RESPONSES, strict=True)):
            logits = base(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
            torch.testing.assert_close(found[row, : len(response)], expected, rtol=1e-4, atol=1e-5)
            assert (found[row, len(response) :] == 0).all()


def test_rows_are_packed_in_16_and_in_4_bits(tmp_path):
    assert SharedBase(tiny_model().to(torch.bfloat16)).packs_rows
    assert saved_base(tmp_path, "bfloat16").packs_rows


@pytest.mark.card
@pytest.mark.parametrize("nf4", [False, True])
def test_rows_are_packed_on_a_card_where_it_is_asked_for(nf4, tmp_path):
    """On one where there is one, with prompts that are read in a line, too."""
    model = saved_base(tmp_path, kind=nf4 and "nf4", card=True).causal_lm
    base = SharedBase(model, pack_rows=True)
    base.add_role("reference")
    line, alone = (
        Sequences.from_ids(BEGUN, RESPONSES, pad_token_id=0, device=base.device, pack=pack) for pack in (True, False)
    )
    assert base.packs_rows and line.packed and SharedBase(model).packs_rows == (base.device.type == "cpu")
    with torch.no_grad(), base.role("reference"):
        found, expected = (response_logprobs(base, sequences) for sequences in (line, alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 if nf4 else 1e-4)


def test_rows_are_packed_or_not_as_asked(monkeypatch):
    model = tiny_model()
    assert SharedBase(model).can_pack and not SharedBase(model, pack_rows=False).can_pack
    base = SharedBase(tiny_architecture("bloom"))
    assert not base.can_pack
    with pytest.raises(ModelError, match="pack_rows: a BloomForCausalLM does not keep rows apart that stand one after"):
        SharedBase(base.causal_lm, pack_rows=True)
    SharedBase(tiny_model().to("meta"), pack_rows=True)  # where nothing can be tried
    assert not SharedBase(tiny_model()).to("meta").can_pack  # one that goes to a card goes there as one from there
    assert SharedBase(tiny_model(), pack_rows=True).to("meta").can_pack
    monkeypatch.setattr("toolkit.models.value_model.rows_can_be_packed", lambda *trial: False)
    model = ValueModel(own_classifier("llama"), None)
    SharedBase(tiny_model()).place_value(model)
    with pytest.raises(ModelError, match="does not keep rows apart .* as base.pack_rows has them"):
        SharedBase(tiny_model(), pack_rows=True).place_value(model)


def test_a_base_whose_checkpointed_layers_lose_the_rows_is_packed_without_checkpointing():
    """transformers' older way of checkpointing hands layers what they name, and nothing else."""
    base = shared_base()

    def without_lengths(module, given, named):
        return given, {name: value for name, value in named.items() if not (name == "row_lengths" and module.training)}

    for checkpointed, packs in ((False, True), (True, True), (False, True)):
        (base.gradient_checkpointing_enable if checkpointed else base.gradient_checkpointing_disable)()
        assert base.packs_rows == packs and not base.training
    for layer in base.causal_lm.model.layers:
        layer.register_forward_pre_hook(without_lengths, with_kwargs=True)
    base.train()
    for checkpointed in (False, True, False):
        (base.gradient_checkpointing_enable if checkpointed else base.gradient_checkpointing_disable)()
        assert base.packs_rows == (not checkpointed) and base.training
    base.pack_rows = True
    with pytest.raises(ModelError, match="^pack_rows: with gradient checkpointing its layers do not keep rows apart"):
        base.gradient_checkpointing_enable()


def test_a_base_that_reads_no_line_of_prompts_is_not_packed():
    model = tiny_model()

    def without_lengths(module, given, named):
        if named.get(CACHE) is not None:
            named = {name: value for name, value in named.items() if name != "row_lengths"}
        return given, named

    hook = model.model.register_forward_pre_hook(without_lengths, with_kwargs=True)
    assert not SharedBase(model).packs_rows
    hook.remove()
    assert SharedBase(model).packs_rows


@pytest.mark.parametrize("kind", ["jamba", "lfm2", "olmo_hybrid", "qwen3_5_text", "bloom"])
@pytest.mark.parametrize(("scale", "dtype"), [(0.3, torch.float32), (0.02, torch.float32), (0.2, torch.bfloat16)])
def test_states_that_reach_from_row_to_row_are_not_packed(kind, scale, dtype):
    """However little reaches the next row: with small weights it is less than 16 bits round away."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    layers = {"layer_types": ["full_attention", "conv", "full_attention"]} if kind == "lfm2" else {}
    layers |= {"num_hidden_layers": len(layers["layer_types"])} if layers else {}
    assert not SharedBase(tiny_architecture(kind, initializer_range=scale, **layers).to(dtype)).packs_rows


@pytest.mark.parametrize("prompts", [PROMPTS, BEGUN], ids=["", "a common beginning"])
def test_what_comes_after_packed_responses(prompts):
    base, (line, alone) = (
        shared_base(),
        (Sequences.from_ids(prompts, RESPONSES, pad_token_id=0, pack=pack) for pack in (True, False)),
    )
    with torch.no_grad(), base.role("value"):
        found, expected = (value_after_response(base, sequences) for sequences in (line, alone))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_positions_of_single_ones_where_positions_are_learnt(side, monkeypatch):
    """As on a card, where no rows are packed; a Llama's positions are relative."""
    base, rows = shared_base(architecture="gpt2"), [[*a, *b] for a, b in zip(PROMPTS, RESPONSES, strict=True)]
    monkeypatch.setattr(SharedBase, "packs_rows", False)
    with torch.no_grad():
        alone = [sequence_logits(base, torch.tensor([row]), torch.ones(1, len(row)), pad_token_id=0) for row in rows]
        found = sequence_logits(base, *pad_rows(rows, pad_token_id=0, side=side), pad_token_id=0)
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("besides", ["", "a common beginning", "checkpointing", "noise"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_reward_reads_packed_rows_and_learns_from_them(side, besides, monkeypatch):
    """Scores and gradients of padded rows, against those of each row by itself; none is packed where transformers has
    NEFTune's noise on, whose hook is left out here."""
    prompts = BEGUN if besides == "a common beginning" else PROMPTS
    base, rows = shared_base(), [prompt + response for prompt, response in zip(prompts, RESPONSES, strict=True)]
    base.train_roles("reward")
    weights = torch.tensor([0.5, -2.0, 1.5, 1.0])

    def gradients(scores):
        return torch.autograd.grad((scores * weights).sum(), base.parameters_of("reward"))

    with base.role("reward"):
        states = [base.hidden_states(torch.tensor([row]), torch.ones(1, len(row)))[0, -1] for row in rows]
        expected = base.head("reward")(torch.stack(states)).squeeze(1)
        of_expected = gradients(expected)
    if besides == "checkpointing":
        base.gradient_checkpointing_enable()
    if besides == "noise":
        base.causal_lm.get_input_embeddings().neftune_noise_alpha = 5.0
    base.train()
    read, whole = [], base.hidden_states
    monkeypatch.setattr(base, "hidden_states", lambda ids, *of, **named: read.append(ids) or whole(ids, *of, **named))
    ids, mask = pad_rows(rows, pad_token_id=0, side=side)
    found = sequence_logits(base, ids, mask, pad_token_id=0).squeeze(1)
    assert read[0].shape == {"noise": (4, 11), "a common beginning": (1, 40)}.get(besides, (1, 32))
    for ours, alone in zip((found, *gradients(found)), (expected, *of_expected), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)
