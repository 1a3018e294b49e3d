"""A trained run, opened again."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.tiny_runs import chat_recipe, command_here
from toolkit.checkpoints import whole_folder
from toolkit.errors import AdapterError, CheckpointError, RecipeError, ToolkitError
from toolkit.inference import saved_run
from toolkit.inference.evaluate import as_trained, evaluate
from toolkit.inference.export import export_adapter, export_merged
from toolkit.inference.generate import converse, generate, generate_best, respond
from toolkit.inference.saved_run import open_run, policy_folder, trained_sampler
from toolkit.models import load_base
from toolkit.runs import stages
from toolkit.trainers.same_run import of_base


def test_a_run_is_opened_by_name_or_folder(trained):
    folder, recipe = trained
    for run in ("chat", str(folder / "runs" / "chat")):
        opened = open_run(run, "seed=5", runs_dir=folder / "runs")
        assert opened.folder == recipe.folder and opened.seed == 5
    with pytest.raises(RecipeError, match='no run "chatt" in .*runs. There are chat.'):
        open_run("chatt", runs_dir=folder / "runs")
    with pytest.raises(RecipeError, match="ppo: its settings are needed where the run is used"):
        open_run("chat", "ppo=null", runs_dir=folder / "runs")
    with pytest.raises(RecipeError, match="That folder does not exist yet: make ppo trains a run."):
        open_run("chat", runs_dir=folder / "nowhere")


def test_a_run_of_that_name_comes_before_a_folder_of_it(trained, tmp_path, monkeypatch):
    """As where runs are compared."""
    folder, recipe = trained
    shutil.copytree(recipe.folder, tmp_path / "chat")
    monkeypatch.chdir(tmp_path)
    assert open_run("chat", runs_dir=folder / "runs").folder == recipe.folder
    assert open_run("chat", runs_dir="elsewhere").folder.resolve() == tmp_path / "chat"


def test_a_folder_within_a_run_is_told_as_that(trained):
    _, recipe = trained
    for inside in ("ppo", "ppo/policy"):
        with pytest.raises(
            RecipeError, match="That is a folder of the run chat, which is meant by its own name or path"
        ):
            open_run(str(recipe.folder / inside), runs_dir=recipe.folder.parent)


def test_a_run_of_earlier_stages_alone_has_no_policy_to_use(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint, "ppo=null", sft={"max_steps": 1}, scorer=None)
    stages.claim(recipe, "sft", overwrite=False)
    (recipe.stage_folder("sft") / "policy").mkdir(parents=True)
    with pytest.raises(
        RecipeError, match=r'has no section "ppo" or "q"\. The adapter that sft trained is .*/sft/policy, a PEFT'
    ) as told:
        open_run("chat", runs_dir=tmp_path / "runs")
    assert "again" not in str(told.value)


def test_the_loop_of_trl_is_none_of_what_a_trained_run_needs(trained, tmp_path, monkeypatch):
    _, recipe = trained
    shutil.copytree(recipe.folder, tmp_path / "chat")
    path = tmp_path / "chat" / "recipe.yaml"
    values = yaml.safe_load(path.read_text())
    values["ppo"]["loop"] = "trl"
    path.write_text(yaml.safe_dump(values))
    monkeypatch.setattr(saved_run, "HAS_PPO", False)
    assert saved_run.not_here(tmp_path / "chat")["ppo.loop"] == "toolkit"


def test_an_unfinished_run_is_named_with_what_finishes_it(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint)
    stages.claim(recipe, "ppo", overwrite=False)
    with pytest.raises(RecipeError, match="its ppo stage has not finished. Run that stage of .*chat.recipe.yaml again"):
        open_run("chat", runs_dir=tmp_path / "runs")
    said = command_here("chat", "chat", cwd=tmp_path).stderr
    assert said.endswith("Run that stage of runs/chat/recipe.yaml again.\n")
    (saved := recipe.stage_folder("ppo") / "checkpoint-1").mkdir()
    said = command_here("chat", "chat", cwd=tmp_path).stderr
    assert "Run that stage of runs/chat/recipe.yaml again with RESUME=1 (--resume)." in said
    assert "checkpoint" not in said  # what is there is none
    (saved / "trainer_state.json").write_text("{}")
    assert (
        "Or use a checkpoint of it: chat, generate, eval and export take --checkpoint 1."
        in command_here("chat", "chat", cwd=tmp_path).stderr
    )
    shutil.rmtree(saved)
    (recipe.stage_folder("ppo") / "policy").mkdir(parents=True)
    (recipe.stage_folder("ppo") / "policy" / "adapter_model.safetensors").write_text("x")
    with pytest.raises(RecipeError, match="another run can have start.policy=.*chat/ppo/policy"):
        open_run("chat", runs_dir=tmp_path / "runs")


def plain_generation(model, tokenizer, ids, length):
    """The text of transformers' own greedy decoding, and the smallest gap between its two likeliest tokens."""
    output = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=length, do_sample=False,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    best = torch.cat(output.logits).topk(2).values
    text = tokenizer.decode(output.sequences[0, len(ids) :], skip_special_tokens=True)
    return text, float((best[:, 0] - best[:, 1]).min())


def test_responses_are_those_of_plain_peft(trained):
    """In float32: in bfloat16 two tokens of a random model are often within rounding, which differs between CPUs."""
    folder, _ = trained
    recipe = open_run("chat", "base.dtype=float32", runs_dir=folder / "runs")
    sampler = trained_sampler(recipe, temperature=0.0, max_new_tokens=5)
    prompts = [recipe.task.prompt_ids([{"role": "user", "content": text}]) for text in ("Hi", "How are you?", "a")]
    base = load_base(recipe.base_path, quantization=recipe.quantization(), dtype="float32")
    reference, gaps = zip(*(plain_generation(base, recipe.tokenizer, ids, 5) for ids in prompts), strict=True)
    plain = PeftModel.from_pretrained(base, str(policy_folder(recipe)))
    policy, more = zip(*(plain_generation(plain, recipe.tokenizer, ids, 5) for ids in prompts), strict=True)
    assert min(*gaps, *more) > 1e-5, "a choice hangs on rounding: take other prompts"
    rows = [{"input_ids": ids} for ids in prompts]
    assert tuple(respond(sampler, rows)) == policy != reference
    assert tuple(respond(sampler.reference, rows)) == reference


@pytest.mark.parametrize("bits", [4, 32])
def test_another_base_than_that_of_the_training_is_told(bits, trained, tmp_path):
    """As where one was exchanged in its place: an adapter fits on every base of its shape."""
    there = shutil.copytree(trained[1].folder, tmp_path / "runs" / "chat")
    path = there / "ppo" / "before.json"
    kept, recipe = json.loads(path.read_text()), yaml.safe_load((there / "recipe.yaml").read_text())
    if bits == 32:  # as a run without 4 bits has it
        kept["made_with"] |= of_base(load_base(trained[1].base_path, dtype="float32"))
        path.write_text(json.dumps(kept))
        recipe["base"] |= {"quantization": None, "dtype": "float32"}
        (there / "recipe.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True))
    run = open_run("chat", runs_dir=tmp_path / "runs")
    export_merged(run, tmp_path / "same")  # and warns of nothing
    trained_sampler(run)
    path.write_text(json.dumps({**kept, "made_with": {**kept["made_with"], "base": "another"}}))
    for use in (trained_sampler, lambda run: export_merged(run, tmp_path / "merged")):
        with pytest.warns(
            UserWarning, match="has other weights than the base that .*ppo was trained on, so its adapters were not"
        ):
            use(run)


def test_logits_in_the_run_s_own_precision_are_those_of_plain_peft(trained):
    """Up to the rounding of bfloat16, in which autocast computes the adapters that plain PEFT computes in float32."""
    _, recipe = trained
    sampler = trained_sampler(recipe)
    assert (sampler.role, sampler.temperature, sampler.response_length) == ("policy", 1.0, 6)  # as in a chat
    roles = sampler.roles
    ids = torch.tensor([recipe.task.prompt_ids([{"role": "user", "content": "How are you?"}])])
    base = load_base(recipe.base_path, quantization=recipe.quantization())
    with torch.no_grad():
        reference = base(input_ids=ids).logits.float()
        plain = PeftModel.from_pretrained(base, str(policy_folder(recipe)))(input_ids=ids).logits.float()
        with roles.role("policy"), roles.autocast():
            ours = roles(input_ids=ids).logits.float()
    effect, error = (plain - reference).abs().max(), (ours - plain).abs().max()
    assert error < 0.1 * effect


@pytest.fixture
def stopped(trained, tmp_path, monkeypatch):
    """The trained run as a stop leaves it: no result, and two checkpoints, of which the first is of no effect."""
    folder, recipe = trained
    monkeypatch.chdir(folder)  # where its reward is found
    there = shutil.copytree(recipe.folder, tmp_path / "runs" / "chat") / "ppo"
    for step, factor in ((1, 0.0), (2, 1.0)):
        with whole_folder(there / f"checkpoint-{step}") as aside:
            shutil.copytree(there / "policy", aside / "policy")
            weights = aside / "policy" / "adapter_model.safetensors"
            save_file({name: factor * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
            (aside / "trainer_state.json").write_text("{}")
    shutil.rmtree(there / "policy")
    (there / "result.json").unlink()
    return partial(open_run, "chat", runs_dir=tmp_path / "runs"), there


def test_a_checkpoint_is_used_as_the_run_it_is_of(stopped, trained, tmp_path):
    opened, ppo = stopped
    first, second = (opened(checkpoint=step) for step in (1, 2))
    assert policy_folder(second) == ppo / "checkpoint-2" / "policy"
    (answer,) = generate(first, texts=["Hi"], max_new_tokens=4, compare=True)
    assert answer["policy"] == answer["reference"]
    (best,) = generate_best(first, num_samples=2, texts=["Hi"])
    assert len(best["candidates"]) == 2
    exported = load_file(export_adapter(second, tmp_path / "out") / "adapter_model.safetensors")
    whole = load_file(policy_folder(trained[1]) / "adapter_model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in whole.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "seed 0, its checkpoint of update 2." in card and "What PPO changed" not in card


def test_a_checkpoint_is_used_where_q_has_finished_too(stopped):
    """Without one it is Q that responds."""
    opened, ppo = stopped
    (ppo.parent / "q").mkdir()
    (ppo.parent / "q" / "result.json").write_text("{}")
    for by_q in (True, False):
        recipe = opened(checkpoint=2, by_q=by_q)
        assert recipe.checkpoint == 2 and trained_sampler(recipe, compare=False).role == "policy"
    made_with = json.loads((ppo / "before.json").read_text())["made_with"]
    assert as_trained(recipe, {"made_with": {**made_with, "base": "another"}})[0]["not_as_trained"] == ["base"]
    with pytest.raises(RecipeError, match="has Q-values and no policy"):
        opened()
    shutil.rmtree(ppo)
    with pytest.raises(RecipeError, match="responds by Q-values, and a checkpoint is one of PPO"):
        opened(checkpoint=2, by_q=True)


def test_what_is_measured_of_a_checkpoint_says_so(stopped):
    opened, ppo = stopped
    result = evaluate(opened(checkpoint=1))
    assert result["checkpoint"] == 1 and result["after"] == pytest.approx(result["before"])
    assert json.loads((ppo.parent / "eval" / "result.json").read_text())["checkpoint"] == 1


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(stopped, trained):
    opened, ppo = stopped
    with pytest.raises(RecipeError, match=r'"chat" has no checkpoint of step 7. It has that of step 1 or 2\.$'):
        opened(checkpoint=7)
    for words in (("chat",), ("generate",), ("generate", "--num-samples=2"), ("eval",), ("export", "out")):
        command, *rest = words
        said = command_here(command, "chat", *rest, "--checkpoint", 7, cwd=ppo.parents[2]).stderr
        assert said.endswith('"chat" has no checkpoint of step 7. It has that of step 1 or 2.\n'), words
    with pytest.raises(RecipeError, match="checkpoint of step 7. It has saved none."):
        open_run("chat", runs_dir=trained[1].runs_dir, checkpoint=7)
    with pytest.raises(RecipeError, match=r"has not finished.*Or use a checkpoint.* --checkpoint 1 or 2"):
        opened()
    with pytest.raises(RecipeError, match="own name or path. chat, .* take --checkpoint 1, too"):
        open_run(str(ppo / "checkpoint-1" / "policy"))
    (ppo / "checkpoint-1" / "policy" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match="checkpoint-1: .*adapter_model.safetensors has 0 bytes.*Take another one"
    ):
        opened(checkpoint=1)


# ---------------------------------------------------------------------- damaged, or not to be written


def copied(trained, tmp_path):
    """The trained run, for a test that changes it."""
    shutil.copytree(trained[1].folder, tmp_path / "runs" / "chat")
    return tmp_path / "runs"


@pytest.mark.parametrize("text", ["", "{", '{"after": ', "[]", "3", "null", '"finished"', "\x00", "[" * 5000])
def test_a_damaged_result_is_named(text, trained, tmp_path):
    runs = copied(trained, tmp_path)
    (runs / "chat" / "ppo" / "result.json").write_text(text)
    with pytest.raises(ToolkitError, match=r"chat/ppo/result.json (cannot be read|is damaged)") as caught:
        open_run("chat", runs_dir=runs)
    assert "\n" not in str(caught.value) and "again with overwrite=True" in str(caught.value)
    recipe = replace(trained[1], runs_dir=runs)
    with pytest.raises(ToolkitError, match="result.json (cannot be read|is damaged)"):
        stages.run(recipe, "ppo")


def test_a_policy_whose_weights_are_damaged_or_no_numbers_is_not_exported(trained, tmp_path):
    """Of a run that has no hashes, too."""
    runs = copied(trained, tmp_path)
    (runs / "chat" / "ppo" / "manifest.json").unlink()
    weights = runs / "chat" / "ppo" / "policy" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    state = {name: tensor.clone() for name, tensor in load_file(weights).items()}  # the file is mapped
    damaged = {"too short": whole[:20], "another header": b"\xff" * 8 + whole[8:], "empty": b""}
    for number, data in enumerate(damaged.values()):
        weights.write_bytes(data)
        for export in (export_adapter, export_merged):
            with pytest.raises(AdapterError, match="adapter_model.safetensors is damaged"):
                export(open_run("chat", runs_dir=runs), tmp_path / f"out-{number}")
    for value in (float("nan"), float("inf")):
        name = sorted(state)[0]
        save_file({**state, name: torch.full_like(state[name], value)}, weights)
        with pytest.raises(AdapterError, match=f"{name} is not finite. Train it again"):
            export_adapter(open_run("chat", runs_dir=runs), tmp_path / "out")
        with pytest.raises(AdapterError, match="is not finite"):
            trained_sampler(open_run("chat", runs_dir=runs))


def test_where_nothing_can_be_written_is_said_before_anything_is_loaded(trained, tmp_path, monkeypatch):
    recipe = trained[1]
    monkeypatch.setattr("toolkit.runs.build.placed_roles", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setattr("toolkit.inference.export.load_base", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("mine")
    for export in (export_adapter, export_merged):
        with pytest.raises(ToolkitError, match=r"file: cannot be written \(File exists\)"):
            export(recipe, tmp_path / "file")
        with pytest.raises(ToolkitError, match=r"file/out: cannot be written \(Not a directory\)"):
            export(recipe, tmp_path / "file" / "out")
    for respond_to in (generate, partial(generate_best, num_samples=2)):
        for output, message in (("nowhere/out.jsonl", "No such file or directory"), ("file/out", "Not a directory")):
            with pytest.raises(ToolkitError, match=rf"{output}: cannot be written \({message}\)"):
                respond_to(recipe, output=tmp_path / output)
        with pytest.raises(ToolkitError, match="is no file"):
            respond_to(recipe, output=tmp_path)
    runs = copied(trained, tmp_path)
    shutil.rmtree(runs / "chat" / "eval", ignore_errors=True)  # where a test has measured the run before
    (runs / "chat" / "eval").write_text("mine")
    with pytest.raises(ToolkitError, match=r"eval: cannot be written \(File exists\)"):
        evaluate(open_run("chat", runs_dir=runs))
    assert (tmp_path / "file").read_text() == (runs / "chat" / "eval").read_text() == "mine"


def test_a_name_is_no_way_out_of_the_folder_of_runs(trained, tmp_path):
    runs = copied(trained, tmp_path)
    for name in ("../runs/chat", "chat/../chat", str(runs / ".." / "runs" / "nothing"), "..", ""):
        with pytest.raises(RecipeError, match="no run "):
            open_run(name, runs_dir=runs)


def test_a_run_is_used_where_what_training_needed_is_not(trained, tmp_path, monkeypatch):
    folder, recipe = trained
    shutil.copytree(recipe.folder, tmp_path / "runs" / "chat")
    path = tmp_path / "runs" / "chat" / "recipe.yaml"
    values = yaml.safe_load(path.read_text())
    values["ppo"] |= {"report_to": ["wandb"], "tf32": True, "optim": "schedule_free_adamw", "optim_args": "r=0.5"}
    values["ppo"] |= {"generation": "merged_graphs", "fp16": True, "use_cpu": False}  # of a card, which is not here
    values["base"]["dtype"] = "float16"
    followed = {"metric_for_best_model": "judge", "early_stopping_patience": 3, "load_best_model_at_end": True}
    values["ppo"] |= {**followed, "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1}  # a judge's
    values["start"] = {"value": str(tmp_path / "critic")}  # which reads nothing that is measured
    values["base"]["attn_implementation"] = "flash_attention_2"
    values["reward"] = {"max_steps": 1, "use_liger_kernel": True}
    monkeypatch.setattr("toolkit.inference.saved_run.is_liger_kernel_available", lambda: False)
    path.write_text(yaml.safe_dump(values))
    monkeypatch.setattr("toolkit.spec.stage.get_available_reporting_integrations", lambda: [])
    for module in ("transformers.training_args", "toolkit.inference.saved_run"):  # as on an older card
        monkeypatch.setattr(f"{module}.is_torch_tf32_available", lambda: False)
    monkeypatch.setattr("toolkit.inference.saved_run.torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(folder)  # where its reward is found
    assert "changed" not in evaluate(open_run("chat", runs_dir=tmp_path / "runs"))
    values["data"]["train"] = values["data"]["validation"] = str(tmp_path / "gone.jsonl")
    values["start"] = {"policy": str(tmp_path / "warm")}  # which the reference is, and nothing else
    path.write_text(yaml.safe_dump(values))
    opened = open_run("chat", runs_dir=tmp_path / "runs")
    merged, told = export_merged(opened, tmp_path / "merged")
    assert (merged / "model.safetensors").is_file()
    assert "over 64 tokens of the vocabulary, since the data cannot be read here, the logits differ" in told
    assert "on the quantised base, at" in told
    assert len(generate(opened, texts=["Hi"])) == 1
    lines, shown = iter(["/compare", "Hi", "/quit"]), []
    sampler = trained_sampler(opened, max_new_tokens=1, compare=False)
    converse(opened, sampler, read=lambda _: next(lines), write=shown.append)
    assert any("there is no folder" in one for one in shown) and "[reference]" not in shown
    policy_folder(opened).rename(tmp_path / "warm")
    lines = iter(["/compare", "Hi", "/quit"])
    converse(opened, sampler, read=lambda _: next(lines), write=shown.append)
    assert shown.count("[reference]") == 1
