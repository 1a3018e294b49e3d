import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.recorded import ASKING
from tests.tiny_models import ARCHITECTURES, lora, shared_base, tiny_model
from tests.tolerances import EXACT, FP32
from toolkit.data import pad_rows
from toolkit.models import (
    Sequences,
    SharedBase,
    forward,
    read_policy,
    response_logprobs,
    response_values,
    score_positions,
    sequence_logits,
)

PROMPTS = [[1, 4, 9], [1, 30, 31, 32, 33]]
RESPONSES = [[12, 13, 2], [20, 21, 22, 23, 24, 2]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("pad_token_id", [0, 2])  # a pad of its own, and pad == eos
def test_logprobs_and_values_equal_unpadded_rows(architecture, pad_token_id):
    base = shared_base(architecture=architecture)
    sequences = Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=pad_token_id)
    with torch.no_grad():
        with base.role("policy"):
            logprobs = response_logprobs(base, sequences, temperature=0.7)
        with base.role("value"):
            values = response_values(base, sequences)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            ids, n = torch.tensor([prompt + response]), len(response)
            with base.role("policy"):
                logits = base(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1)[torch.arange(n), torch.tensor(response)]
            torch.testing.assert_close(logprobs[row, :n], expected, rtol=1e-4, atol=1e-5)
            with base.role("value"):
                hidden = base.hidden_states(ids, torch.ones_like(ids))[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(values[row, :n], (hidden @ base.heads["value"].weight.T).squeeze(-1), **FP32)
            assert (logprobs[row, n:] == 0).all() and (values[row, n:] == 0).all()


def test_one_pass_for_a_shared_value_gives_what_two_give():
    base = shared_base(value="shared")
    sequences = Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0)
    with torch.no_grad(), base.role("policy"):
        logprobs, values, *_ = read_policy(base, sequences)
        torch.testing.assert_close(logprobs, response_logprobs(base, sequences), **EXACT)
        torch.testing.assert_close(values, response_values(base, sequences), **EXACT)


class Asked(TorchDispatchMode):
    """Notes the operators for which the host waits until a card has an answer."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        asking = {*ASKING, torch.ops.aten.masked_scatter_backward.default}
        indices = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put) else ()
        if func in asking or any(x is not None and x.dtype is torch.bool for x in indices):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"entropy": True}, {"ref_kl": True}])
def test_a_card_is_asked_for_nothing_between_a_pass_and_the_end_of_its_gradient(settings):
    """Else it would stand idle until Python has launched what follows. (transformers asks before its first layer.)"""
    base = shared_base(value="shared")
    base.causal_lm.model.layers[0].register_forward_hook(lambda *_: asked.names.clear())
    sequences = Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0)
    with Asked() as asked, base.role("policy"):
        assert sequences.response_places[0].tolist() == [0] * 3 + [1] * 6 and len(asked.names) > 0
        reading = read_policy(base, sequences, **settings)
        sum(x.sum() for x in reading if x is not None).backward()
    assert asked.names == []
    assert base.parameters_of("policy")[0].grad is not None


def test_no_logits_for_prompt_positions():
    base = shared_base()
    rows = []
    base.lm_head.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[0]))
    with torch.no_grad(), base.role("policy"):
        response_logprobs(base, Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0))
    assert sum(rows) == sum(map(len, RESPONSES))


def test_masks_come_from_lengths():
    sequences = Sequences.from_ids([[2, 2]], [[2, 2, 2]], pad_token_id=2)  # nothing but pad ids, all of them real
    assert sequences.attention_mask.tolist() == [[True] * 8]  # rounded up; causality hides what comes last
    assert sequences.response_mask.tolist() == [[True] * 3]
    ragged = Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0)
    assert ragged.response_mask.sum(1).tolist() == [3, 6]
    assert [of.tolist() for of in ragged.predicting] == [[0] * 3 + [1] * 6, [2, 3, 4, 4, 5, 6, 7, 8, 9]]
    with pytest.raises(ValueError, match="at least one token"):
        Sequences.from_ids([[]], [[3]], pad_token_id=0)


@pytest.mark.parametrize(
    ("row", "pad", "expected"),
    [
        ([1, 5, 6, 2], 0, 3),  # pad ≠ eos: read at eos
        ([1, 5, 6, 2], 2, 2),  # pad == eos: read before it, as transformers does
        ([1, 2, 6, 7], 2, 3),  # an eos in the middle, as between chat turns, is no end
        ([2, 2], 2, 1),  # nothing else to read
    ],
)
def test_where_a_score_is_read(row, pad, expected):
    for side, shift in (("right", 0), ("left", 3)):
        ids, mask = pad_rows([row, [5] * (len(row) + 3)], pad_token_id=pad, side=side)
        assert score_positions(ids, mask, pad)[0].item() == expected + shift


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("packs", [True, False])
def test_scores_do_not_depend_on_padding(packs, architecture, monkeypatch):
    base, masks = shared_base(labels=3, architecture=architecture), []
    base.pack_rows, read = packs, base.hidden_states
    monkeypatch.setattr(base, "hidden_states", lambda ids, mask, **more: masks.append(mask) or read(ids, mask, **more))
    rows = [[1, 5, 6, 2], [1, 9, 8, 7, 6, 5, 4, 2]]
    with torch.no_grad():
        alone = torch.cat(
            [sequence_logits(base, torch.tensor([r]), torch.ones(1, len(r)), pad_token_id=0) for r in rows]
        )
        for side in ("left", "right"):
            ids, mask = pad_rows(rows, pad_token_id=0, side=side)
            torch.testing.assert_close(
                sequence_logits(base, ids, mask, pad_token_id=0), alone, rtol=1e-4, atol=1e-5, msg=side
            )
    if not packs:  # what leaves something out keeps a GPU's attention from its fastest kernels
        assert masks[-1].all() and not masks[-2].all()


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_rounding_lengths_up_stays_within_learned_positions(architecture):
    model = tiny_model(architecture)
    limit = 29  # no multiple of 8
    if architecture == "gpt2":
        model.transformer.wpe.weight.data = model.transformer.wpe.weight.data[:limit]
    else:  # OPT's table has two rows more than positions
        table = model.model.decoder.embed_positions
        table.weight.data = table.weight.data[: limit + 2]
    base = SharedBase(model)
    base.add_role("policy", lora())
    ids = list(range(1, limit + 1))
    with torch.no_grad(), base.role("policy"):
        ours = response_logprobs(base, Sequences.from_ids([ids[:9]], [ids[9:]], pad_token_id=0))[0]
        logits = base(input_ids=torch.tensor([ids])).logits[0, 8:-1].log_softmax(-1)
    torch.testing.assert_close(ours, logits.gather(1, torch.tensor(ids[9:])[:, None])[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype", "under", "kept"), [
    ("llama", torch.float16, None, True), ("cohere", torch.float16, None, False),
    ("gemma2", torch.float16, None, False), ("gemma2", torch.float32, torch.float16, False),
    ("cohere", torch.bfloat16, None, True), ("cohere", torch.float32, None, True),
])  # fmt: skip
def test_in_float16_logits_that_are_changed_are_made_again_for_the_gradient(kind, dtype, under, kept, monkeypatch):
    """A gradient that is made with them would be rounded before a loss scaler comes to it."""
    model, asked, whole = tiny_architecture(kind).to(dtype), [], forward.token_logprobs
    base = SharedBase(model)
    base.add_role("policy", lora())
    monkeypatch.setattr(
        forward, "token_logprobs", lambda *given, **named: asked.append(named["frozen_head"]) or whole(*given, **named)
    )
    sequences = Sequences.from_ids([[1, 4]], [[7, 2]], pad_token_id=0)
    with base.role("policy"), torch.autocast("cpu", under, enabled=under is not None):
        response_logprobs(base, sequences)
        read_policy(base, sequences)
    assert asked == [kept] * 2
