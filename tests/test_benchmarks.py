"""The benchmark's own arithmetic and fairness, on a tiny model; the figures themselves are in benchmarks/results."""

import io
import json
import re
import socket
import subprocess
from dataclasses import replace

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.bnb import Linear4bit as LoraLinear4bit
from rich.console import Console
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks import contenders, demonstrations, floor, gpu, role_switch, table, worker
from benchmarks import run as driver
from benchmarks.compare import check_equal, differences
from benchmarks.contenders import CONTENDERS, add_roles
from benchmarks.demonstrations import DEMONSTRATIONS, recipe_of_arm
from benchmarks.errors import BenchmarkError
from benchmarks.random_llama import LLAMA_8B, TINY, random_llama, weight_gigabytes
from benchmarks.summary import bar_line, bars, summarise
from benchmarks.work import PHASES, PROMPTS, SIZES, Size, Work, given_responses, padding_tokenizer, uneven_lengths
from tests.recipes.helpers import REPOSITORY, byte_tokenizer, save_llama
from toolkit import recipes
from toolkit.data import pad_rows
from toolkit.models import SharedBase, load_base
from toolkit.models.base import outline
from toolkit.recipes.schema import check_recipe
from toolkit.recipes.sections import STAGE_CLASSES

SIZE = Size(rollouts=4, response_length=10, micro_batch=2)
BY_HAND = Work(
    size=Size(rollouts=2, response_length=4, micro_batch=1, epochs=2),
    prompt_ids=[[5, 6, 7], [8, 9, 5, 6, 8]],
    sampled=[[10, 11, 12, 13], [14, 15, 16, 17]],
    lengths=[4, 2],
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<pad>"  # TRL's masks come from pad ids
    return str(save_llama(tmp_path_factory.mktemp("bench"), tokenizer))


@pytest.fixture(scope="module")
def work(checkpoint):
    return worker.sample(checkpoint, SIZE)


# ---------------------------------------------------------------------- the work


def test_lengths_go_from_a_sixth_to_all_and_the_first_is_full():
    assert uneven_lengths(4, 12) == [12, 2, 5, 9]  # 2 + 10 · i/3, one further each time
    for size in SIZES.values():
        lengths = uneven_lengths(size.rollouts, size.response_length)
        assert sorted(lengths)[0] == size.response_length // 6
        assert lengths.count(size.response_length) == 1
        assert len(set(lengths)) == size.rollouts


def test_responses_and_tokens_by_hand():
    assert BY_HAND.responses == [[10, 11, 12, 13], [14, 2]]
    assert BY_HAND.tokens == {"rollout": 6, "score": 14, "update": 28}  # 3 + 5 of prompts, 4 + 2 of responses
    alone = BY_HAND.one_micro_batch()
    assert (alone.responses, alone.size.epochs, alone.size.rollouts) == ([[10, 11, 12, 13]], 1, 1)


def test_a_row_is_found_whatever_it_is_padded_with():
    assert [BY_HAND.row_of([0, 0, 5, 6, 7]), BY_HAND.row_of([8, 9, 5, 6, 8])] == [0, 1]
    with pytest.raises(BenchmarkError, match="a row that is 0 of the prompts"):
        BY_HAND.row_of([1, 2, 3])


def test_another_response_is_refused():
    BY_HAND.check([[10, 11, 12, 13], [14, 2, 99, 99]])  # TRL goes on after the end
    with pytest.raises(BenchmarkError, match="the response to prompt 1 is not the given one"):
        BY_HAND.check([[10, 11, 12, 13], [14, 15, 99, 99]])


def test_the_prompts_are_enough_and_all_different():
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) >= max(size.rollouts for size in SIZES.values())


def test_a_work_comes_back_from_its_file(tmp_path):
    BY_HAND.write(tmp_path / "work.json")
    assert Work.read(tmp_path / "work.json") == BY_HAND


def test_generation_gives_the_responses_and_leaves_the_logits(checkpoint, work):
    model, tokenizer = load_base(checkpoint), padding_tokenizer(checkpoint)
    ids, mask = pad_rows(work.prompt_ids, pad_token_id=tokenizer.pad_token_id, side="left")
    config = GenerationConfig(
        max_new_tokens=10, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, return_dict_in_generate=True,
        output_scores=True, output_logits=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with given_responses(model, work):
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    work.check(found.sequences[:, ids.shape[1] :].tolist())
    assert torch.equal(torch.stack(found.scores), torch.stack(found.logits))
    assert torch.multinomial.__name__ == "multinomial"  # and torch is as it was


def test_a_tokenizer_without_a_second_token_to_pad_with_is_refused(tmp_path):
    with pytest.raises(BenchmarkError, match="neither a pad token nor an unk token"):
        padding_tokenizer(str(save_llama(tmp_path, byte_tokenizer())))


# ---------------------------------------------------------------------- the same computation


@pytest.fixture(scope="module")
def compared(checkpoint, work):
    return {name: worker.compare(checkpoint, work, name) for name in ("ours-separate-bf16", "ours-shared-bf16")}


@pytest.mark.parametrize("name", ["stock-full", "stock-peft", "stock-views"])
def test_stock_computes_the_same_as_ours(name, checkpoint, work, compared):
    found = {**compared, name: worker.compare(checkpoint, work, name)}
    check_equal(found)
    assert found[name]["policy_gradient"] > 0 and found[name]["value_head_gradient"] > 0


def test_a_contender_that_starts_elsewhere_is_refused(checkpoint, work, compared, monkeypatch):
    seed_head = contenders.seed_head
    monkeypatch.setattr(contenders, "seed_head", lambda weight, role: seed_head(weight, f"another {role}"))
    found = {**compared, "stock-full": worker.compare(checkpoint, work, "stock-full")}
    with pytest.raises(BenchmarkError, match=r"nothing is timed\. .*value_loss: \S+ in stock-full, \S+ in ours-sep"):
        check_equal(found)


def test_what_differs_is_named():
    same = {"score": 1.0, "kl": 0.0, "entropy": 50.0, "policy_loss": 0.0, "value_loss": 0.5, "policy_gradient": 1.0,
            "value_head_gradient": 1.0}  # fmt: skip
    found = {name: dict(same) for name in CONTENDERS}
    assert differences(found) == []
    found["stock-peft"]["value_loss"] = 0.53
    found["ours-shared-bf16"]["policy_gradient"] = 9.0  # holds the value loss too: not compared
    found["ours-shared-nf4"]["kl"] = float("nan")
    assert differences(found) == [
        "kl: nan in ours-shared-nf4, 0 in ours-separate-nf4",
        "value_loss: 0.53 in stock-peft, 0.5 in ours-separate-bf16",
    ]


# ---------------------------------------------------------------------- time


@pytest.mark.parametrize("name", ["ours-shared-nf4", "stock-full"])
def test_every_phase_of_every_measured_update_is_timed(name, checkpoint, work):
    found = worker.measure(checkpoint, work, name, updates=2)
    assert [set(update) for update in found["updates"]] == [set(PHASES)] * 2
    assert all(seconds > 0 for update in found["updates"] for seconds in update.values())
    assert found["memory_gb"]["resident"] > 0


def test_a_step_runs_in_a_process_of_its_own(checkpoint, work, tmp_path):
    work.write(tmp_path / "work.json")
    given = {"model": checkpoint, "work": tmp_path / "work.json"}
    found = driver.step_in_process("time", **given, contender="ours-separate-bf16", updates=1)
    assert set(found["updates"][0]) == set(PHASES)


def test_a_step_that_fails_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.sys, "executable", "false")
    with pytest.raises(BenchmarkError, match='the step "time" of stock-peft failed: nothing was said'):
        driver.step_in_process("time", model="none", work=tmp_path / "none", contender="stock-peft")


# ---------------------------------------------------------------------- the floor


def test_operations_by_hand():
    # One layer of 4 × 8 = 32 weights, lm_head of 4 × 10 = 40; an adapter of rank 1 has 4 + 8 = 12.
    found = floor.matmuls(BY_HAND, ((4, 8),), (4, 10), value="separate", rank=1)
    operations = {(m.phase, m.name): m.operations for m in found}
    assert operations == {
        ("rollout", "prompts"): 2 * 8 * (32 + 12),
        ("rollout", "new tokens"): 2 * 4 * (32 + 12),  # 6, less the first of each response
        ("rollout", "lm_head"): 2 * 6 * 40,
        ("score", "forward"): 2 * 14 * (4 * 32 + 3 * 12),  # four roles, three with an adapter
        ("score", "lm_head"): 2 * 6 * 40 * 2,  # policy and reference
        ("update", "forward"): 2 * 14 * (32 + 12) * 2 * 2,  # two roles, two epochs
        ("update", "backward"): 2 * 14 * (32 + 2 * 12) * 2 * 2,
        ("update", "lm_head"): 2 * 6 * 40 * 2,
        ("update", "lm_head backward"): 2 * 6 * 40 * 2,
    }
    shared = floor.matmuls(BY_HAND, ((4, 8),), (4, 10), value="shared", rank=1)
    operations = {(m.phase, m.name): m.operations for m in shared}
    assert operations["score", "forward"] == 2 * 14 * (3 * 32 + 2 * 12)
    assert operations["update", "forward"] == 2 * 14 * (32 + 12) * 2
    assert {m.rows for m in found if m.phase == "update" and m.name == "forward"} == {7}  # of 14 tokens, half the rows


def test_layers_are_those_of_the_model():
    layers, head = floor.linear_layers(outline(LlamaConfig(**TINY)))
    assert layers == 2 * ((64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64))
    assert head == (64, 512)


def test_the_floor_has_seconds_for_every_phase(checkpoint, work):
    found = worker.measure_floor(checkpoint, work)
    for value in ("separate", "shared"):
        parts = found[value]["parts"]
        assert {part["phase"] for part in parts} == set(PHASES)
        for part in parts:
            rate = part["gigaoperations_per_second"]
            assert part["seconds"] == pytest.approx(part["gigaoperations"] / rate)
    # One rate for both: the shared value role only has less to do.
    assert found["shared"]["seconds"]["update"] < found["separate"]["seconds"]["update"]


# ---------------------------------------------------------------------- ratios and bars


def _round(slow=1.0):
    """Round figures; `slow` stretches what is not ours."""
    totals = {
        "ours-separate-bf16": 20, "ours-shared-bf16": 12, "ours-separate-nf4": 30, "ours-shared-nf4": 15,
        "stock-full": 20 * slow, "stock-peft": 25 * slow, "stock-views": 10 * slow,
    }  # fmt: skip
    memory = {"ours-separate-bf16": 2.2, "ours-shared-bf16": 2.4, "ours-separate-nf4": 2.0, "ours-shared-nf4": 2.5,
              "stock-full": 4.0, "stock-peft": 5.0, "stock-views": 3.0}  # fmt: skip
    return {
        "contenders": {
            name: {
                "updates": [{"rollout": seconds / 4, "score": seconds / 4, "update": seconds / 2}],
                "memory_gb": {"resident": memory[name]},
            }
            for name, seconds in totals.items()
        },
        "floor": {
            value: {"seconds": {"rollout": 1.0, "score": 1.0, "update": least}, "parts": []}
            for value, least in (("separate", 3.0), ("shared", 1.0))
        },
    }


def _summary():
    rounds = [_round(), _round(0.9), _round(1.2)]
    return summarise(rounds, tokens={"rollout": 50, "score": 100, "update": 200}, rollouts=16)


def test_ratios_by_hand():
    summary = _summary()
    assert summary["fastest_stock"] == "stock-full"  # not the views: they are not TRL's own interface
    separate = summary["contenders"]["ours-separate-bf16"]
    assert separate["seconds"] == {"rollout": 5, "score": 5, "update": 10, "total": 20}
    assert separate["samples_per_second"] == 16 / 20
    assert separate["tokens_per_second"] == {"rollout": 10, "score": 20, "update": 20}
    assert separate["speed"] == pytest.approx({"median": 1.0, "min": 0.9, "max": 1.2})  # 20, 18 and 24 over 20
    assert separate["memory"] == pytest.approx({"median": 0.55, "min": 0.55, "max": 0.55})
    assert separate["over_floor"]["median"] == 20 / 5
    shared = summary["contenders"]["ours-shared-bf16"]
    assert shared["speed"]["median"] == pytest.approx(20 / 12)
    assert shared["over_floor"]["median"] == 12 / 3
    assert summary["contenders"]["stock-full"]["speed"]["median"] == 1.0


def test_bars_by_hand():
    verdicts = {(bar["contender"], bar["bar"]): bar["met"] for bar in bars(_summary())}
    assert verdicts == {
        ("ours-separate-bf16", "speed"): True,  # 1.0
        ("ours-separate-bf16", "memory"): True,  # 0.55
        ("ours-shared-bf16", "speed"): True,  # 1.67
        ("ours-shared-bf16", "memory"): True,  # 0.6
        ("ours-separate-nf4", "speed"): False,  # 0.67
        ("ours-separate-nf4", "memory"): True,
        ("ours-shared-nf4", "speed"): False,  # 1.33
        ("ours-shared-nf4", "memory"): False,  # 0.625
    }
    lines = [bar_line(bar) for bar in bars(_summary())]
    assert lines[0] == ("ours, separate value, bf16: at least 1 × the speed of the fastest stock form: 1.000, met")
    assert lines[-1].endswith("at most 0.6 of the memory of the fastest stock form: 0.625, missed by 0.025")


# ---------------------------------------------------------------------- the driver, and the docs


@pytest.fixture(scope="module")
def result(checkpoint):
    """The driver's result of two rounds, with made-up figures, and the steps that it asked for."""
    asked = []
    figures = {"score": 0.0, "kl": 0.0, "entropy": 9.0, "policy_loss": 0.0, "value_loss": 1.0, "policy_gradient": 1.0,
               "value_head_gradient": 1.0}  # fmt: skip

    def step(name, *, model, work, contender=None, size=None, updates=None):
        asked.append((name, contender))
        if name == "sample":
            replace(BY_HAND, size=replace(BY_HAND.size, epochs=1)).write(work)
            return {}
        one = _round()
        return {"compare": figures, "floor": one["floor"], "time": one["contenders"].get(contender)}[name]

    console = Console(file=io.StringIO())
    saved = []

    def save(so_far):
        saved.append(len(so_far["sizes"]["base"]["rounds"]))

    found = driver.run(checkpoint, repeats={"base": 2}, updates=1, console=console, save=save, step=step)
    assert saved == [1, 2]  # a benchmark that is stopped keeps its rounds
    return found, asked, console.file.getvalue()


def test_losses_first_and_then_all_contenders_in_turn_in_each_round(result):
    _, asked, shown = result
    names = list(CONTENDERS)
    one_round = [*(("time", name) for name in names), ("floor", None)]
    assert asked == [("sample", None), *(("compare", name) for name in names), *one_round, *one_round]
    assert "base, round 2/2, stock-peft: rollout 6.2, score 6.2, update 12.5, total 25.0 s an update, 5.00 GB" in shown


def test_the_result_says_where_it_ran_and_not_on_whose_machine(result, checkpoint, tmp_path):
    found, _, _ = result
    path = driver.write_result(found, tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_cpu\.json", path.name)
    text = path.read_text(encoding="utf-8")
    assert checkpoint not in text and socket.gethostname() not in text
    read = json.loads(text)
    assert read["machine"]["threads"] == torch.get_num_threads() and read["versions"]["torch"]
    assert read["model"]["parameters"] == sum(p.numel() for p in load_base(checkpoint).parameters())
    assert len(read["sizes"]["base"]["rounds"]) == 2


def test_sizes_can_be_run_one_by_one(result, tmp_path):
    found, _, _ = result
    driver.write_result(found, tmp_path)
    large = {**found, "sizes": {"large": found["sizes"]["base"]}}
    read = json.loads(driver.write_result(large, tmp_path).read_text(encoding="utf-8"))
    assert list(read["sizes"]) == ["base", "large"]
    other = {**large, "machine": {**found["machine"], "cores": 99}}
    read = json.loads(driver.write_result(other, tmp_path).read_text(encoding="utf-8"))
    assert list(read["sizes"]) == ["large"]


def test_the_page_is_filled_from_the_newest_result_of_each_kind(result, tmp_path):
    found, _, _ = result
    page = "".join(f"<!-- {kind} results -->\nold\n<!-- end of {kind} results -->\n" for kind in table.KINDS)
    driver.write_result({**found, "date": "2020-01-01T00:00:00+00:00"}, tmp_path)
    driver.write_result({**found, "date": "2020-01-02T00:00:00+00:00"}, tmp_path)
    filled = table.filled(page, tmp_path)
    assert "2020-01-02" in filled and "2020-01-01" not in filled and "old" not in filled
    assert "<!-- gpu results -->\nNo result yet.\n<!-- end" in filled
    row = next(line for line in filled.splitlines() if line.startswith("| ours, shared value, bf16"))
    assert row == (
        "| ours, shared value, bf16 | 3.00 | 3.00 | 6.00 | 12.00 | 0.17 | 2 / 5 / 2 | 2.40 | 1.67 (1.67–1.67) | "
        "0.60 (0.60–0.60) | 4.00 (4.00–4.00) |"
    )
    assert "| floor, separate value | 1.00 | 1.00 | 3.00 | 5.00 |" in filled
    assert (
        "- ours, shared value, NF4: at least 1.4 × the speed of the fastest stock form: 1.333, missed by 0.067"
        in filled
    )
    with pytest.raises(ValueError, match="lacks the markers of the cpu results"):
        table.filled("no markers")


def test_contenders_that_compute_something_else_are_not_timed(checkpoint, monkeypatch):
    def step(name, *, model, work, contender=None, **_):
        if name == "sample":
            BY_HAND.write(work)
            return {}
        assert name == "compare"
        value = 2.0 if contender == "stock-views" else 1.0
        return {"score": 0.0, "kl": 0.0, "entropy": 9.0, "policy_loss": 0.0, "value_loss": value,
                "policy_gradient": 1.0, "value_head_gradient": 1.0}  # fmt: skip

    with pytest.raises(BenchmarkError, match="value_loss: 2 in stock-views, 1 in ours-separate-bf16"):
        console = Console(file=io.StringIO())
        driver.run(checkpoint, repeats={"base": 1}, updates=1, console=console, save=pytest.fail, step=step)


def test_the_docs_have_the_tables_of_the_committed_results():
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.filled(page), "run python -m benchmarks.table"


def test_committed_results_name_no_folder():
    for path in table.RESULTS.glob("*.json"):
        assert not re.search(r'"(/|[A-Z]:\\|~)', path.read_text(encoding="utf-8")), path


def test_make_bench_without_a_model_says_so():
    done = subprocess.run(["make", "-n", "bench"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "make bench needs a checkpoint: add MODEL=/path/to/SmolLM2-135M-Instruct." in done.stderr


# ---------------------------------------------------------------------- bench-gpu


def test_the_8b_shape_is_that_of_llama_3_1():
    assert sum(p.numel() for p in outline(LlamaConfig(**LLAMA_8B)).parameters()) == 8_030_261_248


def test_the_random_llama_is_what_loading_in_4_bit_gives():
    model = random_llama(TINY, torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    # PEFT's layer for 4 bits is another than for 16, with other casts, and so other seconds and memory.
    adapted = add_roles(SharedBase(random_llama(TINY, torch.device("cpu"))), "shared").causal_lm
    assert {type(layer) for layer in adapted.modules() if isinstance(layer, LoraLayer)} == {LoraLinear4bit}
    layers = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert len(layers) == 2 * 7 and not any("lm_head" in name for name in layers)
    plain = LlamaForCausalLM(LlamaConfig(**TINY))
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    quantised = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    in_16_bits = 2 * 512 * 64 + 5 * 64
    assert weight_gigabytes(model) * 1e9 == pytest.approx(quantised / 2 + 2 * in_16_bits, rel=0.02)  # scales: 1.6 %
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()


def test_both_switches_of_a_role_come_to_the_same():
    found = []
    for switch in (role_switch.ours, role_switch.peft_s):
        roles = role_switch.base(TINY)
        switch(roles)
        layers = [module for module in roles.modules() if isinstance(module, LoraLayer)]
        found.append([(layer.active_adapters, layer.disable_adapters) for layer in layers])
        found.append([name for name, p in roles.named_parameters() if p.requires_grad])
        assert role_switch.milliseconds(switch, roles) > 0
    assert found[:2] == found[2:] and len(found[0]) == 2 * 7


def test_bench_gpu_runs_small_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu", "--small", "--output", str(tmp_path)])
    assert gpu.main() == 0
    (path,) = tmp_path.glob("*_small.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["value"], row["gradient_checkpointing"]) for row in found["rows"]] == [
        ("separate", False), ("separate", True), ("shared", False), ("shared", True),
    ]  # fmt: skip
    for row in found["rows"]:
        assert set(row["seconds"]) == set(row["peak_gb"]) == set(PHASES)
        assert row["over_floor"] > 0
    assert "random weights" in capsys.readouterr().out
    text = table.section("gpu", found)
    assert "| separate | off |" in text and "random weights" in text


def test_a_row_that_ran_out_of_memory_says_where():
    row = {"value": "separate", "gradient_checkpointing": False, "out_of_memory": "update"}
    _, rows = table.gpu_rows({"rows": [row]})
    assert rows[0][:3] == ["separate", "off", "out of memory in update"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_gpu_without_a_gpu_says_so():
    with pytest.raises(BenchmarkError, match="bench-gpu needs a CUDA device"):
        gpu.settings(small=False, updates=1, rollouts=8)


# ---------------------------------------------------------------------- demonstrations


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_each_arm_of_a_demonstration_is_a_recipe_that_differs_in_what_it_says(name):
    demonstration = DEMONSTRATIONS[name]
    start = recipes.load(demonstration.recipe, runs_dir="nowhere")
    seen = []
    for arm in demonstration.arms.values():
        values = recipe_of_arm(start, arm, demonstration)
        assert check_recipe(values) == []
        assert values.keys() & STAGE_CLASSES.keys() == {"ppo"}  # what comes before is there, once for all arms
        assert ("policy" in values["start"]) == (start.base.model is not None and "sft" in start.values)
        config = STAGE_CLASSES["ppo"](output_dir="unused", use_cpu=True, bf16=False, **values["ppo"])
        assert config.max_steps == demonstration.updates
        assert all(getattr(config, key) == value for key, value in arm.ppo.items())
        seen.append(values)
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])


def test_a_demonstration_s_figure_and_table_hold_what_was_measured(tmp_path, monkeypatch):
    curve = [{"update": u, "score": 0.1 * u, "kl": 0.2 * u, "exact_match": u / 10} for u in (5, 10)]
    one = {"after": {"exact_match": 0.5, "score": -1.0, "kl": 2.0}, "curve": curve, "value_loss": [[5, 1.0], [10, 0.5]]}
    two = {**one, "after": {"exact_match": 0.7, "score": -2.0, "kl": 4.0}}
    arms = {name: {"0": one, "1": two} for name in DEMONSTRATIONS["value"].arms}
    about = {"machine": {"processor": "a chip", "threads": 1}, "date": "2026-01-01", "demonstration": "value"}
    (tmp_path / "value.json").write_text(json.dumps({**about, "arms": arms}))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- value: made by benchmarks.demonstrations -->\nold\n<!-- end of value -->\nAfter.\n")
    monkeypatch.setattr(demonstrations, "DOCS", tmp_path)
    monkeypatch.setattr(demonstrations, "PAGE", page)
    demonstrations.show(tmp_path / "value.json")
    text = page.read_text()
    assert "| 0.600 (0.500–0.700) | -1.500 (-2.000–-1.000) | 3.000 (2.000–4.000) |" in text and "old" not in text
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "a chip, 1 thread(s), 2026-01-01." in text
    assert "</svg>" in (tmp_path / "figures" / "value.svg").read_text()
