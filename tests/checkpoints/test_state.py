import json
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.checkpoints import (
    check_state,
    get_random_states,
    kept_random_states,
    read_state,
    set_random_states,
    write_state,
)
from toolkit.checkpoints.state import STATE_FILE
from toolkit.errors import CheckpointError

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]).map(lambda d: torch.ones(2, 3).to(d)),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
@given(tree=st.dictionaries(st.text(), TREES, max_size=4))
def test_what_is_written_is_read(tree, tmp_path):
    write_state(tmp_path, tree)
    same(read_state(tmp_path), tree)


def test_places_of_one_name_and_keys_that_cannot_be_read(tmp_path):
    ones = [torch.full((1,), float(number)) for number in range(4)]
    tree = {"len": {"mean": ones[0]}, "len.mean": ones[1], 1: ones[2], "1": ones[3]}
    write_state(tmp_path, tree)
    same(read_state(tmp_path), tree)
    with pytest.raises(CheckpointError, match=r"state.seen has the key \(4, 6\), a tuple, which cannot be saved"):
        write_state(tmp_path, {"seen": {(4, 6): 1}})


def test_an_optimizer_goes_on_to_the_same_bits(tmp_path):
    def made():
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 3))
        optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.8, 0.95))
        return weight, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def steps(made, number):
        weight, optimizer, schedule = made
        for _ in range(number):
            (weight**3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return made

    whole = steps(made(), 5)
    weight, optimizer, schedule = steps(made(), 3)
    write_state(tmp_path, {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    state, (again, fresh_optimizer, fresh_schedule) = read_state(tmp_path), made()
    again.data.copy_(weight.data)
    fresh_optimizer.load_state_dict(state["optimizer"])
    fresh_schedule.load_state_dict(state["schedule"])
    assert torch.equal(steps((again, fresh_optimizer, fresh_schedule), 2)[0], whole[0])


def test_shared_memory_and_views_are_written_apart(tmp_path):
    whole = torch.arange(6.0).view(2, 3)
    write_state(tmp_path, {"a": whole, "b": whole.T, "c": whole[0]})
    state = read_state(tmp_path)
    assert torch.equal(state["b"], whole.T) and torch.equal(state["c"], whole[0])


def test_what_needs_pickle_is_refused_with_its_place(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.a\.0\.b is a object, which cannot be saved without pickle"):
        write_state(tmp_path, {"a": [{"b": object()}]})
    with pytest.raises(CheckpointError, match=r"^the reward's state\.seen is a set, which"):
        check_state({"seen": {1}}, "the reward's state")


def test_numbers_of_numpy_are_written_as_what_they_are(tmp_path):
    mean, seen = np.mean(np.array([0.1, 0.2], dtype=np.float32)), np.array([3, 4]).sum()
    write_state(tmp_path, {"mean": mean, "seen": seen, "any": np.bool_(True)})
    state = read_state(tmp_path)
    assert state == {"mean": mean.item(), "seen": 7, "any": True}
    assert [type(value) for value in state.values()] == [float, int, bool]


def test_missing_and_damaged_state(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds weights alone and no state\.json"):
        read_state(tmp_path)
    write_state(tmp_path, {"a": torch.ones(2)})
    json.loads((tmp_path / STATE_FILE).read_text())  # other tools can read it
    (tmp_path / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)
    write_state(tmp_path, {})
    for text in ("[" * 100_000, '{"tuple": 3}', '{"map": [[[], 1]]}', '{"tensor": []}', '{"map": [1]}', "{}"):
        (tmp_path / STATE_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="the saved state cannot be read"):
            read_state(tmp_path)


def draws():
    return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]


def test_random_states_go_on_where_they_were(tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    np.random.randn()  # leaves a second normal number waiting, which is state too
    write_state(tmp_path, get_random_states())
    expected = draws()
    draws()
    set_random_states(read_state(tmp_path))
    assert draws() == expected
    set_random_states(read_state(tmp_path))
    with kept_random_states():
        draws()
    assert draws() == expected


def test_states_of_cards_are_kept_and_one_that_is_not_there_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    states = [torch.tensor([card, 7], dtype=torch.uint8) for card in range(2)]
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    write_state(tmp_path, get_random_states())
    put = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put.append((state.tolist(), device)))
    set_random_states(read_state(tmp_path))
    assert put == [([0, 7], 0)]
