"""New tokens by passes that are played back, against transformers' own loop; without a card: `tests.recorded`."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from transformers import GenerationConfig

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.models.test_decoding import IDS, MASK, PROMPTS, base_of, greedy
from tests.recorded import graphs_without_a_card
from tests.tiny_models import VOCABULARY, lora, randomize, saved_base, shared_base, tiny_model
from tests.trainers.helpers import trainer
from toolkit.data import doubling
from toolkit.errors import ConfigError
from toolkit.models import SharedBase
from toolkit.models.caches import CACHE
from toolkit.models.decoding import decode
from toolkit.models.graphs import RecordedPass
from toolkit.sampling import Sampler
from toolkit.trainers import self_checks

recorded = partial(decode, graphs=True)
FIVE_TOKENS = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=99, pad_token_id=0)


def a_base(kind, tmp_path):
    """One of the tests' own architectures, or another tiny one."""
    try:
        return base_of(kind, tmp_path)
    except KeyError:
        base = SharedBase(tiny_architecture(kind))
        base.add_role("policy", lora())
        return randomize(base, "policy")


# By positions learnt and turned, latent attention, and windows that are longer than a row.
KINDS = ["llama", "qwen2", "gpt2", "opt", "llama in NF4", "mistral", "youtu", "gemma3_text"]


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "padded"), [*((kind, True) for kind in KINDS), ("llama", False), ("gpt2", False)])
def test_tokens_are_those_of_transformers_own_loop(kind, padded, tmp_path):
    base, ids = a_base(kind, tmp_path), IDS if padded else torch.arange(3, 27).view(6, 4)
    with base.role("policy"):
        theirs, their_logits = greedy(base.causal_lm, by=None, eos=99, ids=ids)
        with graphs_without_a_card() as graphs:
            ours, our_logits = greedy(base.causal_lm, by=recorded, eos=99, ids=ids)
    assert torch.equal(ours, theirs) and ours.shape == (6, 9)
    for one, other in zip(our_logits, their_logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    # The first token is of the prompts, the second of a plain pass.
    assert [graph.played for graph in graphs] == [7]
    passes = []
    base.causal_lm.register_forward_hook(lambda *_: passes.append(1))
    with base.role("policy"), graphs_without_a_card():
        greedy(base.causal_lm, by=recorded, eos=99)
    assert len(passes) == 3


@pytest.mark.parametrize("merged", [False, True])
def test_rows_that_have_ended_leave_by_halves(merged):
    base = shared_base()
    base.stop_token_ids = lambda tokenizer: list(range(2, 8))  # so that many rows end soon
    sampler = partial(Sampler, base, doubling.tokenizer(), response_length=16, temperature=2.0, merged=merged)
    eager, by_graphs = sampler(), sampler(graphs=True)
    batch, numbers = eager.collator([{"input_ids": ids} for ids in PROMPTS * 2]), []
    expected = eager(batch, keys=torch.arange(12))
    hook = base.causal_lm.register_forward_hook(lambda _, __, made: numbers.append(max(made.logits.shape[:2])))
    with graphs_without_a_card() as graphs:
        found = by_graphs(batch, keys=torch.arange(12))
    hook.remove()
    assert found.response_ids == expected.response_ids
    for ours, theirs in zip(found.sampler_logprobs, expected.sampler_logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
    longer = [sum(len(ids) > step for ids in expected.response_ids) for step in range(17)]
    rows, expected_rows, left = 12, [], True
    for step in range(1, 16):
        known = longer[step if left else step - 1]  # how many go on is known a token later, but where rows have left
        if left := 0 < known <= rows / 2:
            rows = longer[step]
        if not known or not rows:
            break
        expected_rows.append(rows)
    bunches = {rows: expected_rows.count(rows) for rows in dict.fromkeys(expected_rows)}
    assert len(bunches) > 2
    # Each number of rows has a plain pass, and one that is recorded if there are more tokens.
    assert numbers[1:] == [rows for rows, times in bunches.items() for _ in range(min(times, 2))]
    assert [graph.played for graph in graphs] == [times - 1 for times in bunches.values() if times > 1]


def test_what_is_computed_after_all_have_ended_is_not_given():
    """How many rows go on is known a token later, so that a card need not stand idle until Python has asked."""
    model = tiny_model()
    for stop in range(VOCABULARY):
        by = {"eos": [stop, 2], "tokens": 12, "ids": IDS[:1]}
        theirs, seen = greedy(model, by=None, **by)
        with graphs_without_a_card():
            ours, our_seen = greedy(model, by=recorded, **by)
        assert torch.equal(ours, theirs)
        ended_later = 1 < len(seen) < 12  # the first answer is waited for
        assert len(our_seen) == len(seen) + ended_later


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_of_the_weights_that_were(dtype):
    """In 16 bits adapters and heads are cast once for a rollout, which a graph reads."""
    base = shared_base()
    base.causal_lm.to(dtype)
    new = torch.Generator().manual_seed(7)

    def logits_of(by):
        with base.role("policy"), base.autocast(), base.weights_kept():
            return greedy(base.causal_lm, by=by, eos=99)[1]

    with graphs_without_a_card():
        before = logits_of(recorded)
        with torch.no_grad():
            for parameter in base.parameters_of("policy"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=new))
        after = logits_of(recorded)
    expected = logits_of(decode)
    assert all((a - b).abs().max() > 1 for a, b in zip(after, before, strict=True))
    near = 1e-4 if dtype is torch.float32 else 0.1
    for one, other in zip(after, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


def with_eager_attention(*, sdpa=True):
    model = tiny_architecture("llama")
    model.set_attn_implementation("eager")
    model._supports_sdpa = sdpa  # Gemma 2 has none in transformers 5.23
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            partial(tiny_architecture, "mistral", sliding_window=8),
            "of a MistralForCausalLM: its cache is not one of keys and values of all 16 tokens of a row",
        ),
        (partial(tiny_architecture, "mamba"), "of a MambaForCausalLM: its cache is not one of keys and values"),
        (partial(tiny_architecture, "bloom"), "of a BloomForCausalLM: it takes no positions"),
        (partial(tiny_architecture, "qwen3_moe"), "of a Qwen3MoeForCausalLM: operation not permitted"),
        (partial(with_eager_attention, sdpa=False), 'with "eager" attention. Take eager or merged'),
        (with_eager_attention, 'of a LlamaForCausalLM with "eager" attention. Set base.attn_implementation to "sdpa"'),
    ],
)
def test_what_has_no_graphs_is_refused(model, says):
    with graphs_without_a_card(), pytest.raises(ConfigError, match=says) as raised:
        greedy(model(), by=recorded, eos=99)
    assert raised.value.problems[0].field == "generation" and "eager" in raised.value.problems[0].remedy


def test_a_pass_that_asks_for_a_number_is_refused():
    base = shared_base()
    norm = base.causal_lm.model.norm
    norm.register_forward_hook(lambda _, __, made: made * (1 if bool(made.isfinite().all()) else 0))
    refusal = "of a LlamaForCausalLM: operation not permitted.*In a new process: take eager or merged"
    with graphs_without_a_card(), pytest.raises(ConfigError, match=refusal):
        greedy(base.causal_lm, by=recorded, eos=99)


@pytest.mark.parametrize(
    ("wrong", "kind"), [("out of memory", torch.OutOfMemoryError), ("launch failure", RuntimeError)]
)
def test_what_a_card_says_of_playing_back(wrong, kind, monkeypatch):
    def refused(graph):
        raise RuntimeError(f"CUDA error: {wrong}\nfurther lines")

    monkeypatch.setattr("tests.recorded.Graph.replay", refused)
    with graphs_without_a_card(), pytest.raises(RuntimeError, match=wrong) as met:
        shared_base().generate(IDS, MASK, FIVE_TOKENS, graphs=True)
    assert type(met.value) is kind


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])  # of the allocator, and of CUDA itself
def test_where_memory_runs_out_it_says_so_and_holds_none(kind):
    """The rows of a pass are then halved (`toolkit.portion`)."""
    base, passes, caches = shared_base(), [], []

    def out_of_memory(_, given, named):
        caches.append(weakref.ref(named[CACHE]))
        if len(caches) == 3:  # the one that is recorded
            raise kind("CUDA error: out of memory")

    base.causal_lm.register_forward_pre_hook(out_of_memory, with_kwargs=True)
    gc.disable()
    try:
        with graphs_without_a_card():
            try:
                base.generate(IDS, MASK, FIVE_TOKENS, graphs=True)
            except torch.OutOfMemoryError:
                passes.append(1)
            assert passes and caches[0]() is None
    finally:
        gc.enable()


def test_windows_are_held_against_the_longest_prompt_before_a_run(tmp_path, monkeypatch):
    """A batch of shorter ones would do, and the check of a few tokens, too."""
    monkeypatch.setattr(self_checks, "check_device_records", lambda device: None)

    def made(window):
        base = SharedBase(tiny_architecture("mistral", sliding_window=window))
        base.add_role("reference")
        for role in ("policy", "value"):
            base.add_role(role, lora())
        return trainer(tmp_path, base, lambda rollout: [0.5] * len(rollout), generation="graphs", response_length=9)

    made(25)  # prompts of six tokens, padded to eight, and nine more: room is in eights
    with pytest.raises(
        ConfigError, match="generation: graphs cannot be made of a MistralForCausalLM: its cache is not"
    ):
        made(17)


def test_a_pass_reads_what_it_is_given_each_time():
    """One that is played back has the ids, the positions and the mask of its own token."""
    base = shared_base()
    given = []
    own = RecordedPass.__call__

    def noted(recorded_pass, **inputs):
        passed = own(recorded_pass, **inputs)
        held = recorded_pass._given
        given.append(
            (held["input_ids"].clone(), held["position_ids"].clone(), held["attention_mask"].sum(-1).flatten())
        )
        return passed

    with pytest.MonkeyPatch.context() as patch, graphs_without_a_card():
        patch.setattr(RecordedPass, "__call__", noted)
        tokens = base.generate(IDS, MASK, FIVE_TOKENS, graphs=True)
    lengths = MASK.sum(dim=1)
    for step, (ids, positions, seen) in enumerate(given):
        assert torch.equal(ids[:, 0], tokens[:, step])
        assert torch.equal(positions[:, 0], lengths + step) and torch.equal(seen, lengths + step + 1)


@pytest.mark.card
@pytest.mark.parametrize(("generation", "nf4"), [("graphs", False), ("graphs", True), ("merged_graphs", False)])
def test_an_update_learns_from_what_was_played_back(generation, nf4, tmp_path, monkeypatch):
    """On a card where there is one: what a graph needs of real kernels only it can show."""
    on_card, dtype = torch.cuda.is_available(), "bfloat16" if nf4 else "float32"
    if not on_card:
        monkeypatch.setattr(self_checks, "check_device_records", lambda device: None)
    base = saved_base(tmp_path / "base", dtype, kind=nf4 and "nf4", compute="bfloat16", card=True)
    base.stop_token_ids = lambda tokenizer: list(range(2, 8))
    base.add_role("reference")
    for role in ("policy", "value"):
        base.add_role(role, lora())
    randomize(base, "policy", "value")
    changes = {"response_length": 24, "per_device_train_batch_size": 16, "bf16": nf4, "use_cpu": not on_card}
    ours = trainer(tmp_path / "run", base, lambda rollout: [0.5] * len(rollout), generation=generation, **changes)
    batch = next(iter(ours.dataloader))
    with nullcontext([]) if on_card else graphs_without_a_card() as graphs:
        for _ in range(2):
            responses = ours.generate(batch)
            assert max(responses.lengths) > 6
            stats = ours.step(batch, responses, ours.score(batch, responses))
            assert stats["sampler_gap"] < (0.1 if nf4 else 1e-3)
    assert on_card or len(graphs) > 4
