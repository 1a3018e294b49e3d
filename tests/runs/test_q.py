"""The stages collect and q by their real entry points, on models small enough for a few seconds."""

import contextlib
import io
import json
import shutil
import signal
import statistics

import pytest
import torch
from rich.console import Console
from transformers import set_seed

from tests.tiny_models import tiny_model
from tests.tiny_runs import chat_recipe, command_here, stages_here, texts
from tests.trainers.helpers import PROMPTS, Counting, rollout
from toolkit import processes, recipes
from toolkit.data import doubling
from toolkit.errors import CheckpointError, DataError, RecipeError, RunInterrupted, SelfCheckError, ToolkitError
from toolkit.inference.evaluate import evaluate
from toolkit.inference.generate import converse, respond
from toolkit.inference.saved_run import open_run, trained_sampler
from toolkit.models import SharedBase
from toolkit.reports import Progress, read_jsonl, write_jsonl
from toolkit.rewards import DenseScores, WeightedSum
from toolkit.runs import collect, stages
from toolkit.runs.folder import work_of
from toolkit.runs.memory import out_of_memory
from toolkit.sampling import SIGNS, Sampler

SMALL = (
    "sft.max_steps=2", "q.max_steps=2", "q.eval_steps=1", "q.logging_steps=1", "q.save_steps=1",
    "q.per_device_train_batch_size=8", "collect.max_prompts=30", "collect.batch_size=8", "data.validation_size=8",
    "data.test_size=8", "base.config.n_layer=1", "seed=4294967295",
)  # fmt: skip
KEYS = {"score", "score_se", "kl", "length", "eos_share", *SIGNS, "exact_match", "style_accuracy"}
RULE = {"kind": "function", "function": "toolkit.rewards.rules:plain_words"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`toolkit q doubling_q` from nothing, with a small model."""
    folder = tmp_path_factory.mktemp("q")
    with stages_here():
        done = command_here("q", "doubling_q", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, done


@pytest.mark.smoke
def test_one_command_pretrains_collects_and_learns(run):
    folder, done = run
    made = folder / "runs" / "doubling_q"
    result = json.loads((made / "q" / "result.json").read_text())
    assert result["stage"] == "q" and result["before"].keys() == result["after"].keys() == KEYS
    for role in ("q", "q_target"):
        assert (made / "q" / role / "adapter_model.safetensors").is_file()
        assert (made / "q" / role / "q_bound.safetensors").is_file()
    assert "report: runs/doubling_q/q/report.html" in done.stdout
    assert len((made / "q" / "samples.jsonl").read_text().splitlines()) == 8
    metrics = [json.loads(line) for line in (made / "q" / "metrics.jsonl").read_text().splitlines()]
    assert {"td_loss", "conservative_loss", "q", "q_target"} <= metrics[0].keys()
    assert any("eval_exact_match" in row for row in metrics)
    assert not list(made.rglob("*.bin")) and not list(made.rglob("*.pt")) and not list(made.rglob("*.pth"))


def test_what_was_collected_is_for_other_tools_too(run):
    folder, _ = run
    collected = folder / "runs/doubling_q/collect"
    rows = [json.loads(line) for line in (collected / "responses.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 30
    tokenizer = recipes.load("doubling").tokenizer
    for row in rows:
        assert row.keys() == {"prompt_ids", "response_ids", "prompt", "response", "rewards", "ended"}
        assert row["prompt"] == tokenizer.decode(row["prompt_ids"]) and row["prompt"].startswith("S")
        assert len(row["rewards"]) == len(row["response_ids"]) <= 8
        assert row["rewards"][:-1] == [None] * (len(row["rewards"]) - 1) and row["rewards"][-1] in (0.0, 1.0)
        assert row["ended"] == (2 in row["response_ids"])
    result = json.loads((collected / "result.json").read_text())
    assert result["after"]["responses"] == 30 and result["stage"] == "collect"
    assert not (collected / "responses.jsonl.partial").exists()


def test_a_finished_run_can_be_measured_and_says_what_it_is_not(run):
    folder, _ = run
    done = command_here("eval", "doubling_q", cwd=folder)
    assert done.returncode == 0, done.stderr
    first = json.loads((folder / "runs/doubling_q/q/result.json").read_text())
    again = json.loads((folder / "runs/doubling_q/eval/result.json").read_text())
    assert again["before"] == first["before"] and again["after"] == first["after"]
    assert (folder / "runs/doubling_q/q/metrics.jsonl").read_text()
    sampled = ["generate", "doubling_q", "--num-samples", "2", "--temperature", "0.7"]
    for command in (["export", "doubling_q", "out"], sampled):
        done = command_here(*command, cwd=folder)
        assert done.returncode == 1 and "has Q-values and no policy of its own" in done.stderr, command


def test_a_finished_run_answers(run):
    folder, _ = run
    written = folder / "answers.jsonl"
    done = command_here("generate", "doubling_q", "--compare", "--number", "8", "--output", str(written), cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    samples = [json.loads(x) for x in (folder / "runs/doubling_q/q/samples.jsonl").read_text("utf-8").splitlines()]
    assert [row["policy"] for row in rows] == [row["after"] for row in samples]  # both greedy
    assert [row["reference"] for row in rows] == [row["before"] for row in samples]
    recipe = open_run("doubling_q", runs_dir=folder / "runs", by_q=True)
    sampler = trained_sampler(recipe)  # greedy, as the recipe has it
    assert sampler.temperature is None
    sampled = open_run(
        "doubling_q", "q.decoding=sample", "q.decoding_temperature=0.2", runs_dir=recipe.runs_dir, by_q=True
    )
    assert trained_sampler(sampled).temperature == 0.2 and trained_sampler(sampled, temperature=0.7).temperature == 0.7
    said, shown = [], io.StringIO()
    lines = iter(["S小写:5487x2=", "/quit"])
    with contextlib.redirect_stdout(shown):
        converse(recipe, sampler, read=lambda prompt: next(lines), write=said.append)
    (response,) = respond(sampler, [{"input_ids": recipe.task.prompt_ids([{"content": "S小写:5487x2="}])}])
    assert shown.getvalue().strip() == response.strip()


def test_check_counts_what_will_be_collected_and_what_was(run, monkeypatch):
    folder, _ = run
    monkeypatch.chdir(folder)
    fresh = recipes.check(recipes.load("doubling_q", *SMALL, run="fresh"))
    assert texts(fresh) == ()
    stage = next(stage for stage in fresh.stages if stage.stage == "q")
    assert (stage.rows, stage.batch, stage.steps, stage.held_out) == (30, 8, 2, 8)
    assert stage.state == "to be run, after sft and collect"
    roles = {role.role: role for role in fresh.roles}
    assert roles["q"].head_parameters == 2 and roles["q"].trained_by == "q" and roles["q_target"].trained_by is None
    assert roles["q"].adapter_parameters == roles["q_target"].adapter_parameters
    done = recipes.check(recipes.load("doubling_q", *SMALL))
    stage = next(stage for stage in done.stages if stage.stage == "q")
    assert stage.state.startswith("finished in") and stage.rows == 30
    low = recipes.check(recipes.load("doubling_q", *SMALL, "q.highest_return=0.5", run="fresh"))
    assert texts(low) == ()  # what will be collected is not known yet


def interrupted(batch, number):
    """Sampling in which a signal comes at the beginning of a batch, the first being 1."""
    sample, calls = Sampler.__call__, []

    def sampled(self, rows):
        calls.append(1)
        if len(calls) == batch:
            signal.raise_signal(number)
        return sample(self, rows)

    return sampled


def test_a_stopped_collection_goes_on_to_the_same_file(run, tmp_path, monkeypatch):
    folder, _ = run
    recipe = recipes.load("doubling_q", *SMALL, run="doubling_q", runs_dir=folder / "runs")
    whole = (folder / "runs/doubling_q/collect/responses.jsonl").read_bytes()
    monkeypatch.setattr(Sampler, "__call__", interrupted(2, signal.SIGTERM))
    path = tmp_path / "responses.jsonl"
    with pytest.raises(RunInterrupted, match="collect stopped by SIGTERM after 16 of 30 responses; they are saved in"):
        collect.collect(recipe, path)
    monkeypatch.undo()
    partial = tmp_path / "responses.jsonl.partial"
    with partial.open("a") as file:
        file.write('{"prompt_ids": [1')  # what a kill leaves
    asked, prompts = collect.build.stage_dataset, []

    def others(*what):
        prompts.append(asked(*what))
        return prompts[-1].select(range(1, len(prompts[-1])))

    monkeypatch.setattr(collect.build, "stage_dataset", others)
    with pytest.raises(CheckpointError, match=r"partial, line 1: is a response to another prompt.*overwrite=True"):
        collect.collect(recipe, path)
    monkeypatch.setattr(collect.build, "stage_dataset", lambda *what: asked(*what).select(range(5)))
    with pytest.raises(CheckpointError, match=r"partial, line 6: is a response to another prompt"):
        collect.collect(recipe, path)
    monkeypatch.undo()
    begun = tmp_path / "begun_with.json"
    noted, frozen = begun.read_text(), {"reward": "of another adapter"}
    with (
        monkeypatch.context() as patched,
        pytest.raises(CheckpointError, match="the reward adapter is not the one that"),
    ):
        patched.setattr(collect, "frozen_digests", lambda _: frozen)
        collect.collect(recipe, path)
    begun.write_text(noted.replace('"reward": {}', '"reward": {"rule.py": "0"}'))
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match=r"with another version of rule.py"):
        patched.setattr("toolkit.trainers.same_run.code_digests", lambda _: {"rule.py": "1"})
        assert collect.collect(recipe, path)["responses"] == 30
    assert path.read_bytes() == whole and not partial.exists() and not begun.exists()
    # A kill between its name and the result of the stage: nothing is sampled again.
    monkeypatch.setattr(Sampler, "__call__", lambda *_: pytest.fail("sampled again"))
    assert collect.collect(recipe, path)["responses"] == 30
    assert path.read_bytes() == whole and not partial.exists()


def test_a_reward_that_changes_as_it_goes_does_so_in_a_stopped_collection_too(run, tmp_path, monkeypatch):
    folder, _ = run
    recipe = recipes.load("doubling_q", *SMALL, run="doubling_q", runs_dir=folder / "runs")
    path, partial = tmp_path / "responses.jsonl", tmp_path / "responses.jsonl.partial"
    monkeypatch.setattr(collect.build, "make_reward", lambda *_: Counting())
    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "__call__", interrupted(2, signal.SIGTERM))
        with pytest.raises(RunInterrupted, match="after 16 of 30 responses"):
            collect.collect(recipe, path)
    assert "holds responses of" in work_of(tmp_path).wrong
    state, saved = tmp_path / "checkpoint-2", partial.read_bytes()
    state.rename(folder / "elsewhere")
    with pytest.raises(CheckpointError, match="holds 2 batches, and the state that the reward had after them is not"):
        collect.collect(recipe, path)
    assert partial.read_bytes() == saved
    (folder / "elsewhere").rename(state)
    partial.write_bytes(b"".join(saved.splitlines(True)[:8]))  # a power cut took what the state has behind it
    with pytest.raises(CheckpointError, match="holds 1 batches, and the state that the reward had after them is not"):
        collect.collect(recipe, path)
    partial.write_bytes(saved)
    with partial.open("a") as file:  # a kill between the responses of a batch and the state after it
        file.writelines((folder / "runs/doubling_q/collect/responses.jsonl").read_text().splitlines(True)[16:24])
    assert collect.collect(recipe, path)["responses"] == 30
    batches = [1] * 8 + [2] * 8 + [3] * 8 + [4] * 6
    assert [row["rewards"][-1] for row in read_jsonl(path)] == batches
    assert [file.name for file in tmp_path.iterdir()] == ["responses.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_batch_stops_what_would_come_after_it(number, run, tmp_path, monkeypatch):
    folder, _ = run
    recipe = recipes.load("doubling_q", *SMALL, run="doubling_q", runs_dir=folder / "runs")
    monkeypatch.setattr(Sampler, "__call__", interrupted(4, number))  # of 8, 8, 8 and 6 responses
    with pytest.raises(RunInterrupted, match=f"collect stopped by {number.name} after 30 of 30 responses"):
        collect.collect(recipe, tmp_path / "responses.jsonl")
    assert collect.collect(recipe, tmp_path / "responses.jsonl")["responses"] == 30


def collected_together(runs, path):
    recipe = recipes.load("doubling_q", *SMALL, run="doubling_q", runs_dir=runs)
    return collect.collect(recipe, path)


def collected_from_others(runs, path):
    """What is said where a process has other prompts than the main one."""
    ask = collect.build.stage_dataset
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SelfCheckError) as refused:
        if processes.rank():
            patch.setattr(collect.build, "stage_dataset", lambda *what: ask(*what).select(range(1, len(ask(*what)))))
        collected_together(runs, path)
    return str(refused.value)


def test_processes_collect_from_the_same(run, two, tmp_path):
    folder, _ = run
    said = two(collected_from_others, folder / "runs", tmp_path / "responses.jsonl")
    assert all("the processes do not begin with the same data." in one for one in said)


def test_collected_rows_that_cannot_be_used_are_told_of(run, tmp_path, capsys):
    folder, _ = run
    shutil.copytree(folder / "runs/doubling_q", tmp_path / "runs/doubling_q")
    recipe = recipes.load("doubling_q", *SMALL, run="doubling_q", runs_dir=tmp_path / "runs")
    path = recipe.stage_folder("collect") / "responses.jsonl"
    rows = read_jsonl(path)
    rows[3]["response_ids"][0] = len(recipe.tokenizer)  # of an embedding without a token
    write_jsonl(path, rows)
    with Progress("q", Console(file=io.StringIO(), width=300)) as progress:
        assert len(collect.build.rated_dataset(recipe)) == 29
    assert "1 left out: 1 × " in progress.console.file.getvalue()


def test_two_processes_collect_what_one_would(run, two, tmp_path):
    folder, _ = run
    first, second = two(collected_together, folder / "runs", tmp_path / "responses.jsonl")
    assert first == second and first["responses"] == 30
    whole = (folder / "runs/doubling_q/collect/responses.jsonl").read_bytes()
    assert (tmp_path / "responses.jsonl").read_bytes() == whole


def test_a_line_of_responses_ends_where_json_lines_end(tmp_path):
    """Not at U+2028 and its like, which stand in text as they are."""
    partial = tmp_path / "responses.jsonl.partial"
    lines = [json.dumps({"response": f"{i} a\u2028b\u0085c"}, ensure_ascii=False) + "\n" for i in range(5)]
    partial.write_text("".join(lines) + '{"resp', encoding="utf-8")
    assert collect._whole_batches(tmp_path / "responses.jsonl", partial, 2, 6) == 2
    assert partial.read_text(encoding="utf-8") == "".join(lines[:4])


def test_half_a_collection_is_not_deleted_unasked(tmp_path, checkpoint):
    recipe = made(tmp_path, checkpoint)
    stages.claim(recipe, "collect")
    folder = recipe.stage_folder("collect")
    (folder / "responses.jsonl.partial").write_text("{}\n")
    with pytest.raises(
        RecipeError,
        match="was not finished. Go on with resume=True, or begin anew with overwrite=True.",
    ):
        stages.run(recipe, "q")
    assert (folder / "responses.jsonl.partial").is_file()


def made(tmp_path, checkpoint, *overrides, **sections):
    base = {
        "reward": None,
        "ppo": None,
        "adapters": {"q": {"r": 4, "target_modules": "all-linear"}},
        "scorer": RULE,
        "collect": {"response_length": 6, "batch_size": 4, "samples_per_prompt": 2, "max_prompts": 3},
        "q": {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "response_length": 6,
            "decoding": "sample",
            "lowest_return": -6.0,  # a word a token
            "save_strategy": "no",
            "logging_steps": 1,
        },
    }
    return chat_recipe(tmp_path, checkpoint, *overrides, **{**base, **sections})


def test_on_an_nf4_base_with_sampled_answers(tmp_path, checkpoint):
    (tmp_path / "rule.py").write_text(
        "def rule(rollout):\n    return [-(sum(ids) % 6) for ids in rollout.response_ids]"
    )
    scorer = {"kind": "function", "function": f"{tmp_path / 'rule.py'}:rule"}
    recipe = made(tmp_path, checkpoint, scorer=scorer)
    assert recipe.plan.needs("q") == ["collect"]
    collected = stages.run(recipe, "collect")["after"]
    rows = read_jsonl(recipe.stage_folder("collect") / "responses.jsonl")
    scores = [sum(reward or 0.0 for reward in row["rewards"]) for row in rows]
    means = [(one + other) / 2 for one, other in zip(scores[::2], scores[1::2], strict=True)]  # two to a prompt
    assert collected["responses"] == 6 and collected["score"] == pytest.approx(statistics.fmean(scores))
    assert collected["score_se"] == pytest.approx(statistics.stdev(means) / 3**0.5) != 0
    with pytest.raises(RecipeError, match="has no Q-values: its q stage has not finished. Run that stage of "):
        open_run(recipe.run, runs_dir=recipe.runs_dir, by_q=True)
    trainer = recipe.q_trainer()
    assert set(trainer.roles.roles) == {"q", "q_target", "reference"}
    result = stages.run(recipe, "q", overwrite=True)
    assert result["before"]["kl"] == 0.0 and result["after"].keys() == KEYS - {"exact_match", "style_accuracy"}


def test_a_data_set_of_ones_own_needs_no_collecting(tmp_path, checkpoint):
    rows = [
        {"prompt": "Hello", "response": "Hi there", "rewards": 1},
        {"prompt": "Hello", "response": "", "rewards": 1},
    ]
    rows += [{"prompt": "Bye", "response": "So long", "rewards": -0.5}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"collect": None, "q_data": {"task": "rated", "train": str(tmp_path / "mine.jsonl")}}
    recipe = made(tmp_path, checkpoint, "q.lowest_return=-0.5", **own)
    assert recipe.plan.needs("q") == []
    report = recipes.check(recipe)
    assert texts(report) == () and "q_data: train: 2 rated responses; 1 left out: 1 × an empty" in str(report)
    assert "first row of q: '<s>Hello</s><s>Hi there</s>', " in str(report)
    result = stages.run(recipe, "q")
    assert result["left_out"] == {"train": {"an empty response": 1}}
    held_out = [{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in ("Hello", "Never asked")]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    other_data = f"data.validation={tmp_path / 'held_out.jsonl'}"
    assert evaluate(open_run(recipe.run, other_data, runs_dir=recipe.runs_dir, by_q=True))["trained_on"] == 1
    wrong = made(tmp_path, checkpoint, "q.lowest_return=0.0", **own, name="wrong")
    assert any(x.startswith("q.lowest_return — ") for x in _problems(wrong))
    gone = {**own, "q_data": {"task": "rated", "train": str(tmp_path / "none.jsonl")}}
    assert any(
        text.startswith("q_data.train — ") for text in _problems(made(tmp_path, checkpoint, **gone, name="gone"))
    )
    with pytest.raises(DataError, match=r"^q\.lowest_return: it is 0.0"):
        stages.run(wrong, "q")
    with pytest.raises(DataError, match='q_data.task: "preferences" has no rated data, which the q stage needs'):
        task = {"task": "preferences", "train": str(tmp_path / "mine.jsonl")}
        stages.run(made(tmp_path, checkpoint, **{**own, "q_data": task}, name="other"), "q")


def _problems(recipe):
    return texts(recipes.check(recipe))


@pytest.mark.parametrize(("limit", "splits"), [
    ("q.response_length", ("validation", "test")),
    ("collect.response_length", ("train",)),
])  # fmt: skip
def test_a_response_that_positions_cut_short_is_noted(limit, splits, tmp_path, checkpoint):
    report = recipes.check(made(tmp_path, checkpoint, f"{limit}=512"))
    (note,) = [note.text() for note in report.notes]
    task = made(tmp_path, checkpoint).task
    prompt = max(len(ids) for split in splits for ids in task.prompts(split)["input_ids"])
    assert texts(report) == () and note.startswith(f"q — the longest prompt with {limit} comes to {prompt + 512} ")
    assert note.endswith(f"the base has positions for 512: its response can have {512 - prompt}.")


def test_what_makes_a_row_too_long_is_named(tmp_path, checkpoint):
    own = {"collect": None, "q_data": {"task": "rated", "train": str(tmp_path / "mine.jsonl")}}
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "Hello", "response": "a" * 511, "rewards": 0}))
    # Of a longer prompt with its response, of which there is room for a part, there is a note.
    (found,) = _problems(made(tmp_path, checkpoint, "q.response_length=600", **own))
    assert found.startswith("q — the longest row comes to ")
    assert found.endswith("the base has positions for 512. Shorten the limits of the section q_data.")


@pytest.mark.parametrize(("rows", "collects"), [(6, True), (1, False)])  # two responses to each of three prompts
def test_responses_that_fill_no_batch_are_found_before_a_run(rows, collects, tmp_path, checkpoint):
    own = {"collect": None, "q_data": {"task": "rated", "train": str(tmp_path / "mine.jsonl")}}
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "Hello", "response": "a", "rewards": 0}))
    drops = ("q.dataloader_drop_last=true", "q.per_device_train_batch_size=1000")
    (found,) = _problems(made(tmp_path, checkpoint, *drops, **({} if collects else own)))
    assert found.startswith(f"q.dataloader_drop_last — true leaves out the only batch: there are {rows} rows, and")


def test_rewards_at_tokens_and_spans_are_collected_where_they_were_given():
    batch = rollout([[12, 13, 2], [9, 9], [5, 2]], PROMPTS[:3])
    given = {"tokens": [[0.5, 0.0, 0.25], [], []], "spans": [[], [(0, 1, -1.0)], [(0, 1, -2.0)]]}
    dense = DenseScores([1.0, 2.0, 0.0], **given).checked(batch)
    found = list(collect._rewards(batch, dense, doubling.tokenizer()))
    assert found == [[0.5, 0.0, 1.25], [-1.0, 2.0], [-2.0, 0.0]]
    # What is graded 0, or comes to it, is graded.
    spans = [[(0, 1, 0.0)], [(0, 1, 1.0), (0, 1, -1.0)], []]
    graded = DenseScores([0.0, 2.0, 1.0], spans=spans).checked(batch)
    assert list(collect._rewards(batch, graded, doubling.tokenizer())) == [[0.0, None, 0.0], [0.0, 2.0], [None, 1.0]]
    # Without a number for the whole response nothing is given at the end, also in a sum.
    spans_alone = WeightedSum({"words": lambda _: DenseScores(spans=[[], [(0, 1, -1.0)], []])}, {"words": 2.0})
    for whole, last in ((None, None), ([0.0] * 3, 0.0)):
        both = DenseScores(whole, spans=[[], [(0, 1, -1.0)], []]).checked(batch)
        assert list(collect._rewards(batch, both, doubling.tokenizer())) == [
            [None, None, last], [-1.0, last], [None, last]
        ]  # fmt: skip
    found = list(collect._rewards(batch, spans_alone(batch), doubling.tokenizer()))
    assert found == [[None, None, None], [-2.0, None], [None, None]]


def test_each_batch_draws_its_own_numbers(run, tmp_path, monkeypatch):
    folder, _ = run
    recipe = recipes.load("doubling_q", *SMALL, "collect.temperature=0.5", run="doubling_q", runs_dir=folder / "runs")
    seeds, asked = [], []
    monkeypatch.setattr(collect, "set_seed", lambda seed: seeds.append(seed) or set_seed(seed))
    monkeypatch.setattr(
        collect, "Sampler", lambda *given, **named: asked.append(named["temperature"]) or Sampler(*given, **named)
    )
    collect.collect(recipe, tmp_path / "responses.jsonl")
    assert len(set(seeds)) == len(seeds) == 4 and asked == [0.5]
    assert seeds == [(4294967295 * 1_000_003 + batch) % 2**32 for batch in range(4)]


def test_memory_that_runs_out_where_responses_are_collected(tmp_path, checkpoint, monkeypatch):
    def runs_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    recipe = made(tmp_path, checkpoint)
    monkeypatch.setattr(collect.build, "placed_roles", runs_out)
    with pytest.raises(ToolkitError, match=r"^base: the weights of the models do not fit"):
        stages.run(recipe, "collect")
    for stage, one_row, said in (
        ("collect", True, "with one row at a time. Shorten collect.response_length or the prompts"),
        ("collect", False, "GPU memory. Lower collect.batch_size, or shorten collect.response_length or the prompts"),
        ("q", True, "Set q.gradient_checkpointing=true, or halve q.q_chunk_size, and run it again"),
        ("q", True, "A run that begins anew can have shorter rows (collect.response_length)."),
    ):
        assert said in str(out_of_memory(recipe, stage, one_row=one_row))


def test_the_seed_of_the_recipe_draws_the_adapter(tmp_path, checkpoint):
    rows = [{"prompt": "Hello", "response": "Hi", "rewards": 1}, {"prompt": "Bye", "response": "So", "rewards": -0.5}]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    own = {"collect": None, "q_data": {"task": "rated", "train": str(tmp_path / "mine.jsonl")}}
    drawn = []
    for seed, before in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(before)
        trainer = made(tmp_path, checkpoint, f"seed={seed}", **own, name=f"run-{seed}-{before}").q_trainer()
        drawn.append(torch.cat([p.detach().flatten() for p in trainer.roles.parameters_of("q")]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_q_is_bounded_as_the_recipe_says(tmp_path):
    bounds = {"bound": "sigmoid", "lowest_return": -3.0, "highest_return": 2.0, "bound_scale": 0.5, "bound_bias": -1.0}
    roles = SharedBase(tiny_model())
    made(tmp_path, "m", q={"max_steps": 1, **bounds}).plan.stages["q"].source("q").place(roles, None)
    for role in ("q", "q_target"):
        head = roles.heads[role]
        assert (head.lowest, head.highest, head.scale.item(), head.bias.item()) == (-3.0, 2.0, 0.5, -1.0)
