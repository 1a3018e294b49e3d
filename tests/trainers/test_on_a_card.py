"""A whole update with the base on a card: no operator is given tensors of both devices, and one that is, is noticed."""

import inspect
import textwrap
from functools import cached_property

import pytest
import torch

from tests.on_a_card import CARD, OnCard, a_card, put_on_card, trains_on_card
from tests.recorded import graphs_without_a_card
from tests.tiny_models import in_nf4, shared_base
from tests.trainers import resumable
from tests.trainers.helpers import trainer
from toolkit.errors import RewardError
from toolkit.functional import inverse_cdf
from toolkit.models import Sequences
from toolkit.models.graphs import RecordedPass
from toolkit.rewards import adapter
from toolkit.sampling.sampler import Sampler, _Drawn
from toolkit.trainers import self_checks
from toolkit.trainers.objective import Experience
from toolkit.trainers.rollouts import RoleRollouts
from toolkit.trainers.trl_compat import HAS_PPO


def test_the_card_that_is_not_there_raises_as_a_real_one_does():
    with a_card():
        here, there = torch.ones(3), torch.ones(3, device=CARD)
        assert isinstance(there, OnCard) and there.device == CARD and there.tolist() == [1.0, 1.0, 1.0]
        assert (there + 1).device == CARD and float(there.sum()) == 3.0 and (there + here.sum()).device == CARD
        assert there[torch.tensor([0])].device == CARD and there.cpu().device.type == "cpu"
        assert here.to(CARD).device == torch.tensor([1, 2], device=there.device).device == CARD
        mixing = (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: here[there.long()],
            lambda: torch.where(there > 0, here, here),
            lambda: torch.nn.functional.embedding(torch.tensor([0]), there.view(3, 1)),
        )
        for mixed in mixing:
            with pytest.raises(RuntimeError, match="same device"):
                mixed()


def test_a_recording_that_copies_from_the_cpu_is_refused():
    """A graph would hold where the numbers were."""
    with a_card(), graphs_without_a_card():
        there = torch.ones(3, device=CARD)
        copies = (
            lambda: there + torch.tensor([1.0, 2.0, 3.0], device=there.device),
            lambda: there.copy_(torch.ones(3)),
            lambda: there[torch.tensor([0])],
        )
        for copied in copies:
            with (
                pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
                torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
            ):
                copied()
            copied()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            assert (there.double() + there.to(CARD)).device == there.copy_(there + 1).device == CARD


PLAIN = {"optim": "adamw_torch"}  # the fused one knows its devices by name


@pytest.mark.filterwarnings("ignore:truncated_as is bootstrap")
@pytest.mark.parametrize(
    ("settings", "quantised"),
    [
        (PLAIN | {"pack_rows": True}, True),
        (PLAIN | {"pack_rows": True, "value": "shared", "gradient_checkpointing": True}, False),
        (PLAIN | {"value": "shared", "kl_estimator": "full", "kl_penalty_in": "loss"}, False),
        (PLAIN | {"gradient_checkpointing": True, "entropy_coef": 0.01, "truncated_as": "bootstrap"}, False),
        (PLAIN | {"generation": "merged_graphs", "importance_sampling_cap": 2.0}, False),
        (PLAIN | {"value": "shared", "generation": "merged_graphs"}, True),
    ],
    ids=[
        "packed-nf4",
        "packed-and-checkpointing",
        "shared-and-full-kl",
        "checkpointing-and-bootstrap",
        "graphs",
        "nf4-graphs",
    ],
)
def test_an_update_mixes_no_devices_and_comes_to_the_same(settings, quantised, tmp_path, monkeypatch):
    monkeypatch.setattr(self_checks, "check_device_records", lambda device: None)

    def roles():
        model = in_nf4(tmp_path / "checkpoint", device=torch.device("cpu")) if quantised else None
        made = shared_base(model, value=settings.get("value", "separate"))
        if packs:  # else a base that was loaded here and goes to the card packs there no more
            made.pack_rows = True
        return made

    packs, settings = settings.get("pack_rows", False), {name: x for name, x in settings.items() if name != "pack_rows"}
    torch.manual_seed(1)
    eager = settings | {"generation": settings.get("generation", "eager").removesuffix("_graphs")}
    here = trainer(tmp_path / "here", roles(), **eager)
    torch.manual_seed(2)
    batch = next(iter(here.dataloader))
    expected = here.generate(batch)
    stats = here.step(batch, expected, here.score(batch, expected))
    torch.manual_seed(1)
    there = trainer(tmp_path / "there", roles(), **settings)
    torch.manual_seed(2)
    with a_card(), graphs_without_a_card() as graphs:
        batch = next(iter(there.dataloader))
        put_on_card(there.roles)
        assert there.roles.device == CARD
        responses = there.generate(batch)
        assert there.rollouts.sequences(responses, range(2)).packed == packs
        found = there.step(batch, responses, there.score(batch, responses))
    # Up to what `sampler_gap` is of eager passes: what rounding makes, which other instructions round otherwise.
    assert responses.response_ids == expected.response_ids and found == pytest.approx(stats, rel=1e-4, abs=5e-6)
    assert any(graph.played for graph in graphs) == ("graphs" in settings.get("generation", ""))
    moved = there.roles.parameters_of("policy")[1]
    assert moved.device == CARD
    torch.testing.assert_close(moved.numbers, here.roles.parameters_of("policy")[1].detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        pytest.param(
            resumable.sft_policy,
            {},
            marks=pytest.mark.skipif(not HAS_PPO, reason="later TRL's kernel wants a real GPU"),
        ),
        (resumable.reward_pairs, {"loss": "token_level"}),
        (resumable.reward_classes, {}),
        (resumable.q, {}),
    ],
)
def test_a_stage_before_ppo_or_in_its_place_mixes_no_devices_and_learns_the_same(stage, changes, tmp_path):
    settings = PLAIN | changes | {"max_steps": 1, "save_strategy": "no", "dataloader_pin_memory": False}
    here, there = (resumable.make(stage, tmp_path / name, **settings) for name in ("here", "there"))
    before = resumable.weights(here)
    for dropout in (m for made in (here, there) for m in made.roles.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0  # draws otherwise there
    here.train()
    with trains_on_card(there):
        there.train()
        there.evaluate()
        found = {name: weight.cpu() for name, weight in resumable.weights(there).items()}
    assert any(not torch.equal(weight, before[name]) for name, weight in found.items())
    torch.testing.assert_close(found, resumable.weights(here), rtol=1e-3, atol=1e-4)
    here.evaluate()
    measured = [resumable.metrics(tmp_path / name)[-1] for name in ("here", "there")]
    assert measured[0] == pytest.approx(measured[1], rel=1e-3, abs=1e-4)


def test_tokens_are_drawn_without_a_running_sum_where_a_card_is_to_be_deterministic(monkeypatch):
    """torch has no deterministic kernel of one for CUDA, and raises."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(60, 1000, generator=generator)
    uniform = torch.rand(60, dtype=torch.float64, generator=generator)
    tokens, probabilities = inverse_cdf(logits, uniform)
    monkeypatch.setattr(torch.Tensor, "cumsum", None)
    torch.use_deterministic_algorithms(True)
    try:
        with a_card():
            drawn, of_drawn = inverse_cdf(OnCard(logits), OnCard(uniform))
    finally:
        torch.use_deterministic_algorithms(False)
    assert drawn.tolist() == tokens.tolist() and of_drawn.tolist() == pytest.approx(probabilities.tolist())


def without(function, text):
    """A function with a part of its source left out."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@cached_property\n")
    assert source.count(text) >= 1, f"{function} has no {text!r} any more"
    made = {}
    exec(source.replace(text, ""), function.__globals__, made)
    return made[function.__name__]


MUTANTS = [
    (Sampler, "__call__", ".to(self.roles.device)"),
    (Sampler, "__call__", ".to(ids.device)"),
    (_Drawn, "__init__", ", device=device"),
    (RecordedPass, "__init__", ", device=model.device"),
    (Experience, "of", ".to(mask.device)"),
    (RoleRollouts, "sequences", ", device=self.roles.device"),
    (adapter, "read_sequences", ".to(base.device)"),
    (Sequences, "of_responses", ", device=values.device"),
    (Sequences, "response_mask", ", device=self.input_ids.device"),
]


@pytest.mark.parametrize(("owner", "name", "part"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_left_on_the_cpu_is_noticed(owner, name, part, tmp_path, monkeypatch):
    monkeypatch.setattr(self_checks, "check_device_records", lambda device: None)
    generation = "graphs" if owner is RecordedPass else "eager"
    made = trainer(tmp_path, shared_base(), optim="adamw_torch", generation=generation)
    made.roles.stop_token_ids = lambda tokenizer: list(range(2, 12))  # so that rows leave
    batch = next(iter(made.dataloader))
    function = inspect.getattr_static(owner, name)
    asked = isinstance(function, cached_property)
    mutant = without(function.func if asked else function, part)
    monkeypatch.setattr(owner, name, property(mutant) if asked else mutant)
    with a_card(), graphs_without_a_card(), pytest.raises((RuntimeError, RewardError), match="same device"):
        put_on_card(made.roles)
        responses = made.generate(batch)
        made.step(batch, responses, made.score(batch, responses))
