"""Steps of sft and reward on a tiny Llama without numbers; `benchmarks.plan` holds them against an allocator."""

import pytest
import torch
from trl import RewardConfig, SFTConfig

from tests.costs.test_counted import without_numbers
from toolkit.costs import counted_step


def phases(kind, *, rows=2, length=24, steps=1, roles=None, **settings):
    roles = roles or without_numbers()
    owner = SFTConfig if kind == "demonstrations" else RewardConfig
    args = owner(
        output_dir="nowhere", per_device_train_batch_size=rows, gradient_accumulation_steps=steps, use_cpu=True,
        bf16=False, report_to="none", **settings,
    )  # fmt: skip
    return counted_step(kind, roles, args, length, length)


def step(kind, **settings):
    return phases(kind, **settings)[0]


def matmuls(phase):
    return sum(kernel.flops * number for kernel, number in phase.costs.kernels.items())


def test_twice_the_rows_are_twice_the_operations():
    assert matmuls(step("pairs", rows=4)) == pytest.approx(2 * matmuls(step("pairs")))
    assert step("pairs", steps=3).times == 3


def test_an_evaluation_reads_its_own_number_of_rows_forwards_alone():
    for kind in ("demonstrations", "pairs"):
        settings = {"rows": 2, "gradient_checkpointing": False}
        train, four = phases(kind, per_device_eval_batch_size=4, **settings)
        eight = phases(kind, per_device_eval_batch_size=8, **settings)[1]
        assert matmuls(eight) == pytest.approx(2 * matmuls(four), rel=1e-3)
        # A pass back takes once more for what it hands on, and no more for weights that are frozen.
        assert matmuls(train) == pytest.approx(matmuls(four), rel=0.15)
        assert not four.costs.of_peak.get("gradients") and eight.costs.peak > 1.5 * four.costs.peak


def test_layers_that_are_not_checkpointed_keep_their_activations():
    every, second = (
        step("pairs", rows=8, gradient_checkpointing=True, gradient_checkpointing_kwargs=given).costs.peak
        for given in (None, {"every_n_layers": 2})
    )
    assert every < second < step("pairs", rows=8, gradient_checkpointing=False).costs.peak


def test_a_further_micro_batch_stands_on_the_gradients_of_the_first():
    once, again = step("pairs").costs, step("pairs", steps=2).costs
    assert again.of_peak["gradients"] > once.of_peak.get("gradients", 0) and again.peak > once.peak


def test_checkpointing_takes_less_and_computes_more():
    kept, again = (step("pairs", rows=8, gradient_checkpointing=on) for on in (False, True))  # TRL's default is True
    assert again.costs.peak < kept.costs.peak and matmuls(again) > matmuls(kept)


def test_classes_have_one_sequence_where_pairs_have_two():
    roles = without_numbers()
    pairs = step("pairs", roles=roles)
    roles.head("reward").out_features = 3
    assert matmuls(step("labelled", roles=roles)) == pytest.approx(matmuls(pairs) / 2, rel=0.01)


def test_what_is_drawn_afterwards_is_as_if_nothing_had_been_counted():
    roles, before = without_numbers(), torch.get_rng_state()
    step("pairs", roles=roles)
    assert torch.equal(torch.get_rng_state(), before)


def test_packed_rows_of_sft_stand_in_one_line():
    """Each token is multiplied with all of the line, which leaves those of other rows out by a mask."""
    for rows in (4, 1):  # of which each is of several, too
        settings = {"max_length": 64, "length": 64, "gradient_checkpointing": False}
        packed, apart = (step("demonstrations", rows=rows, packing=on, **settings) for on in (True, False))
        alone = step("demonstrations", rows=1, **settings | {"max_length": 64 * rows, "length": 64 * rows})
        assert matmuls(apart) <= matmuls(alone) < matmuls(packed)  # which no kernel of causal attention halves
        assert packed.costs.peak > alone.costs.peak > 0.9 * apart.costs.peak
    wrapped = {"packing": True, "packing_strategy": "wrapped", "max_length": 64, "length": 64}
    assert matmuls(step("demonstrations", padding_free=True, **wrapped)) > matmuls(step("demonstrations", **wrapped))
