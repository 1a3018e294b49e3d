"""The roles "q" and "q_target": an adapter and its moving average, read as Q-values."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from tests.tiny_models import ARCHITECTURES, lora, randomize, tiny_model
from tests.tolerances import EXACT, FP32
from toolkit.errors import AdapterError
from toolkit.models import (
    QBound,
    Sequences,
    SharedBase,
    add_q_roles,
    load_role,
    load_weights,
    response_log_ratios,
    response_logprobs,
    response_q,
    response_state_values,
    save_role,
    tensors_digest,
    update_q_target,
)

PROMPTS = [[1, 4, 9, 7], [1, 30], [1, 5, 6, 8, 11, 12]]
RESPONSES = [[8, 2], [10, 11, 12, 2], [3]]


def q_base(architecture="llama", *, bound=None, random=True, reference=None):
    """`reference`: its adapter, if it is to have one, as after sft."""
    base = SharedBase(tiny_model(architecture))
    base.add_role("reference", reference)
    add_q_roles(base, lora(), bound=bound)
    if random:
        randomize(base, "q", "q_target", *(["reference"] if reference else []))
    base.train_roles("q")
    return base


def sequences(prompts=PROMPTS, responses=RESPONSES):
    return Sequences.from_ids(prompts, responses, pad_token_id=0)


def logits(base, role, prompt, response):
    """(T + 1, V): what a whole forward pass of one unpadded row gives, before each token and after the last."""
    with base.role(role), torch.no_grad():
        return base.causal_lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 :]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bound", [None, QBound(lowest=-1.0, highest=2.0)], ids=["free", "bounded"])
def test_q_is_read_off_the_logits_of_the_role(architecture, bound):
    base = q_base(architecture, bound=bound)

    def values(role, *row):
        found = logits(base, role, *row)
        head = base.heads[role] if bound else None
        return found if head is None else (-1.0 + 3.0 * torch.sigmoid(head.scale * found + head.bias)).detach()

    with base.role("q"), torch.no_grad():
        found = response_q(base, sequences(), lowest=-1.0, chunk_size=2)
    state = response_state_values(base, sequences(), chunk_size=2)
    mask = sequences().response_mask
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        own, target = values("q", prompt, response), values("q_target", prompt, response)
        for t, token in enumerate(response):
            assert float(found.q[i, t]) == pytest.approx(float(own[t, token]), rel=1e-3, abs=1e-4)
            others = torch.cat([own[t, :token], own[t, token + 1 :]])
            assert float(found.excess[i, t]) == pytest.approx(float(((others + 1) ** 2).mean()), rel=1e-3)
            assert float(state.before[i, t]) == pytest.approx(float(target[t].max()), rel=1e-3, abs=1e-4)
        assert float(state.after[i]) == pytest.approx(float(target[-1].max()), rel=1e-3, abs=1e-4)
    assert not found.q[~mask].any() and not state.before[~mask].any()
    if bound:
        assert float(state.before[mask].max()) <= 2.0 and float(found.q.min()) >= -1.0


def test_the_head_sees_response_positions_alone_a_chunk_at_a_time():
    base, seen = q_base(), []
    base.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.shape[:-1].numel()))
    with base.role("q"):
        response_q(base, sequences(), chunk_size=3).q.sum().backward()
    response_state_values(base, sequences(), chunk_size=3)
    assert sum(map(len, RESPONSES)) == 7
    assert seen[:3] == [3, 3, 1] and sorted(seen[3:6]) == [1, 3, 3]  # forward, and again in backward
    assert seen[6:] == [3, 3, 3, 1]  # and one state after each response


def test_only_q_gets_gradient_and_the_target_follows_it():
    base = q_base(bound=QBound(), random=False)
    assert tensors_digest(base.parameters_of("q")) == tensors_digest(base.parameters_of("q_target"))
    with base.role("q"):
        found = response_q(base, sequences())
        (found.q.sum() + found.excess.sum()).backward()
    assert all(p.grad is not None for p in base.parameters_of("q"))
    assert all(p.grad is None and not p.requires_grad for p in base.parameters_of("q_target"))
    randomize(base, "q")
    before = [p.clone() for p in base.parameters_of("q_target")]
    update_q_target(base, decay=0.9)
    for old, now, online in zip(before, base.parameters_of("q_target"), base.parameters_of("q"), strict=True):
        torch.testing.assert_close(now.detach(), 0.9 * old + 0.1 * online.detach(), **FP32)
    assert len(before) == len(base.parameters_of("q")) and before[-1].shape == (1,)  # scale and bias are averaged too


def test_the_target_has_no_dropout():
    base = SharedBase(tiny_model())
    add_q_roles(base, lora(lora_dropout=0.5))
    randomize(base, "q", "q_target")
    base.train()
    first, second = (response_state_values(base, sequences()).before for _ in range(2))
    assert torch.equal(first, second)
    with base.role("q"):
        assert not torch.equal(response_q(base, sequences()).q, response_q(base, sequences()).q)


def test_the_target_costs_an_adapter_and_no_second_base():
    base = SharedBase(tiny_model())
    alone = sum(p.numel() for p in base.parameters())
    add_q_roles(base, lora(), bound=QBound())
    own = sum(p.numel() for p in base.parameters_of("q"))
    assert sum(p.numel() for p in base.parameters_of("q_target")) == own
    assert sum(p.numel() for p in base.parameters()) == alone + 2 * own and own < alone / 2


# ---------------------------------------------------------------------- on disk


@pytest.mark.parametrize("bound", [None, QBound(lowest=-3.0, highest=0.5)], ids=["free", "bounded"])
def test_saved_and_loaded_it_is_the_same(tmp_path, bound):
    base = q_base(bound=bound)
    save_role(base, "q", tmp_path, pad_token_id=0, base_name="tiny")
    assert (tmp_path / "q_bound.safetensors").is_file() == (bound is not None)
    assert json.loads((tmp_path / "role.json").read_text()) == {"role": "q"}
    other = SharedBase(tiny_model())
    load_role(other, "q", tmp_path)
    assert tensors_digest(other.parameters_of("q")) == tensors_digest(base.parameters_of("q"))
    row = sequences()
    with base.role("q"), other.role("q"):
        torch.testing.assert_close(response_q(base, row).q, response_q(other, row).q, **EXACT)
    if bound:
        assert other.heads["q"].lowest == -3.0 and other.heads["q"].highest == 0.5
        wider = q_base(bound=QBound(lowest=-3.0, highest=2.0))
        said = r"between -3.0 and 0.5, and those of this role between -3.0 and 2.0\. Set bound, lowest_return and"
        with pytest.raises(AdapterError, match=said):
            load_weights(wider, "q", tmp_path)
    plain = PeftModel.from_pretrained(tiny_model(), str(tmp_path))  # an ordinary PEFT folder
    ids = torch.tensor([PROMPTS[0] + RESPONSES[0]])
    with torch.no_grad():
        ours = logits(base, "q", PROMPTS[0], RESPONSES[0])
        torch.testing.assert_close(plain(input_ids=ids).logits[0, 3:], ours, **FP32)


def test_names_of_modules_that_begin_with_q_are_not_taken_for_the_role(tmp_path):
    """PEFT finds an adapter's weights by its name, and Llama has a q_proj."""
    base = q_base()
    base.add_role("policy", lora())
    for role in ("q", "q_target", "policy"):
        randomize(base, role, seed=len(role))
        save_role(base, role, tmp_path / role, pad_token_id=0, base_name="tiny")
    other = SharedBase(tiny_model())
    for role in ("q", "q_target", "policy"):
        load_role(other, role, tmp_path / role)
        assert tensors_digest(other.parameters_of(role)) == tensors_digest(base.parameters_of(role))
    assert len({tensors_digest(base.parameters_of(role)) for role in ("q", "q_target", "policy")}) == 3


def test_bounds_that_are_not_those_of_the_role_are_refused(tmp_path):
    save_role(q_base(bound=QBound()), "q", tmp_path / "bounded", pad_token_id=0, base_name="tiny")
    save_role(q_base(), "q", tmp_path / "free", pad_token_id=0, base_name="tiny")
    with pytest.raises(AdapterError, match="Q-values are between 0.0 and 1.0, and those of this role without bounds"):
        load_weights(q_base(), "q", tmp_path / "bounded")
    with pytest.raises(AdapterError, match="Q-values are without bounds, and those of this role between 0.0 and 1.0"):
        load_weights(q_base(bound=QBound()), "q", tmp_path / "free")
    base = q_base(bound=QBound())
    save_role(q_base(), "q", tmp_path / "bounded", pad_token_id=0, base_name="tiny")
    with pytest.raises(AdapterError, match="Q-values are without bounds"):  # no file of the earlier one stayed
        load_weights(base, "q", tmp_path / "bounded")
    with pytest.raises(ValueError, match=r"the lowest return \(1.0\) must be below the highest \(1.0\)"):
        QBound(lowest=1.0, highest=1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lowest": None}, "holds no bound of Q-values .*'lowest'"),
        ({"scale": None}, "holds no bound of Q-values .*scale"),
        ({"scale": torch.zeros(2)}, "holds no bound of Q-values .*scale"),
        ({"highest": torch.zeros(3)}, "holds no bound of Q-values"),
        ({"highest": torch.tensor(-9.0)}, r"holds no bound of Q-values \(the lowest return"),
        ({"bias": torch.tensor([float("nan")])}, "bias is not finite"),
        (None, "is damaged"),
    ],
)
def test_a_damaged_bound_is_named(change, said, tmp_path):
    save_role(q_base(bound=QBound()), "q", tmp_path, pad_token_id=0, base_name="tiny")
    path = tmp_path / "q_bound.safetensors"
    if change is None:
        path.write_bytes(path.read_bytes()[:-9])
    else:
        state = load_file(path) | change
        save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    for load, base in ((load_weights, q_base(bound=QBound())), (load_role, SharedBase(tiny_model()))):
        with pytest.raises(AdapterError, match=f"q_bound.safetensors.* {said}"):
            load(base, "q", tmp_path)


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_log_ratios_of_responses(temperature):
    base = q_base()
    found = response_log_ratios(base, sequences(), temperature=temperature, chunk_size=2)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ref = logits(base, "reference", prompt, response).log_softmax(-1)
        q = logits(base, "q", prompt, response)
        for t, token in enumerate(response):
            policy = 0.0 if temperature is None else (ref[t] + q[t] / temperature).log_softmax(-1)[token]
            assert float(found[i, t]) == pytest.approx(float(policy - ref[t, token]), rel=1e-3, abs=1e-4)
    assert not found[~sequences().response_mask].any()
    with base.role("reference"):
        assert not torch.equal(response_logprobs(base, sequences()), found)


def test_the_target_reads_its_own_part_on_lm_head():
    base = SharedBase(tiny_model())
    base.add_role("reference")
    add_q_roles(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"]))
    randomize(base, "q", "q_target")
    found = response_state_values(base, sequences())
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        best = logits(base, "q_target", prompt, response).amax(-1).tolist()
        ours = [*found.before[i, : len(response)].tolist(), float(found.after[i])]
        assert ours == pytest.approx(best, rel=1e-3, abs=1e-4)
