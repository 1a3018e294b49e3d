"""What can be done with a trained policy, by the command line and from Python."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from tests.recipes.helpers import chat_recipe, command_here
from toolkit import recipes
from toolkit.errors import AdapterError, RecipeError
from toolkit.models import load_base, merge_adapter
from toolkit.recipes import finished, stages, talk


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint):
    """A finished run on an NF4 base, with a policy that is far from its base."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "shorter_for_test.py").write_text("def rule(rollout):\n    return [-float(n) for n in rollout.lengths]\n")
    recipe = chat_recipe(
        folder, checkpoint, "ppo.learning_rate=3e-2", "ppo.max_steps=3", "ppo.eval_do_sample=false", reward=None,
        scorer={"kind": "function", "function": "shorter_for_test:rule"},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stages.run(recipe, "ppo")
    return folder, recipe


def test_a_run_is_opened_by_name_or_folder(trained):
    folder, recipe = trained
    for run in ("chat", str(folder / "runs" / "chat")):
        opened = finished.open_run(run, "seed=5", runs_dir=folder / "runs")
        assert opened.folder == recipe.folder and opened.seed == 5
    with pytest.raises(RecipeError, match='no run "chatt" in .*runs. There are chat.'):
        finished.open_run("chatt", runs_dir=folder / "runs")
    with pytest.raises(RecipeError, match="There is none yet: make ppo trains one."):
        finished.open_run("chat", runs_dir=folder / "nowhere")


def test_an_unfinished_run_is_named_with_the_command_that_finishes_it(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint)
    stages.claim(recipe, "ppo", overwrite=False)
    with pytest.raises(RecipeError, match="its ppo stage has not finished. Finish it with toolkit ppo .*--run chat"):
        finished.open_run("chat", runs_dir=tmp_path / "runs")


def test_evaluation_gives_the_figures_of_training(trained, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    result = finished.evaluate(finished.open_run("chat"))
    trained_result = json.loads((recipe.stage_folder("ppo") / "result.json").read_text())
    for moment in ("before", "after"):
        assert result[moment] == pytest.approx(trained_result[moment], rel=1e-3, abs=1e-3)
    assert json.loads((recipe.folder / "eval" / "result.json").read_text())["stage"] == "eval"
    samples = (recipe.folder / "eval" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 6
    assert json.loads((recipe.stage_folder("ppo") / "result.json").read_text()) == trained_result  # left as it was


def plain_generation(model, tokenizer, ids, length):
    output = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=length, do_sample=False,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)


def test_answers_are_those_of_plain_peft(trained):
    _, recipe = trained
    speaker = talk.Speaker.of_run(recipe, temperature=0.0, max_new_tokens=5, batch_size=2)
    prompts = [speaker.prompt_ids([{"role": "user", "content": text}]) for text in ("Hi", "How are you?", "a")]
    base = load_base(recipe.base_path, quantization=recipe.quantization())
    reference = [plain_generation(base, recipe.tokenizer, ids, 5) for ids in prompts]
    plain = PeftModel.from_pretrained(base, str(finished.policy_folder(recipe)))
    policy = [plain_generation(plain, recipe.tokenizer, ids, 5) for ids in prompts]
    assert speaker.answer(prompts) == policy != reference
    assert speaker.answer(prompts, role="reference") == reference


def test_the_best_of_several_answers(trained, tmp_path):
    folder, _ = trained
    done = command_here(
        "generate", "chat", "Hello", "Bye", "--num-samples", "4", "--temperature", "1.5", "--output",
        tmp_path / "out.jsonl", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(len(row["candidates"]) == 4 for row in rows)
    for row in rows:
        best = max(row["candidates"], key=lambda candidate: candidate["score"])
        assert row["policy"] == best["response"] and row["score"] == best["score"]
    assert "the best of 4" in done.stdout and "KL at most" in done.stdout and "0.6363" in done.stdout
    means = [sum(c["score"] for c in row["candidates"]) / 4 for row in rows]
    assert f"{sum(means) / 2:.4f}" in done.stdout and f"{sum(row['score'] for row in rows) / 2:.4f}" in done.stdout
    refused = command_here("generate", "chat", "Hello", "--num-samples", "4", "--compare", cwd=folder)
    assert refused.returncode == 1 and "leave out --compare" in refused.stderr


def test_generate_shows_and_writes_both(trained, tmp_path):
    folder, _ = trained
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Is it late?\n")
    done = command_here(
        "generate", "chat", "Hello", "--file", prompts, "--compare", "--output", tmp_path / "out.jsonl", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["Hello", "Is it late?"]
    assert all(row.keys() == {"prompt", "policy", "reference"} for row in rows)
    assert "policy" in done.stdout and "reference" in done.stdout
    assert len(talk.answer_all(talk.Speaker.of_run(finished.open_run("chat", runs_dir=folder / "runs")), number=3)) == 3


def test_a_conversation_is_remembered_until_reset(trained, capsys):
    _, recipe = trained
    speaker = talk.Speaker.of_run(recipe, temperature=0.0, max_new_tokens=4)
    asked = []
    real = talk.Speaker.prompt_ids

    def watched(self, messages):
        asked.append([(m["role"], m["content"]) for m in messages])
        return real(self, messages)

    lines = iter(["Hi", "", "/compare", "And you?", "/nonsense", "/reset", "Again", "/quit", "never read"])
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk.Speaker, "prompt_ids", watched)
        talk.converse(speaker, read=lambda _: next(lines), write=shown.append)
    answer = speaker.answer([real(speaker, [{"role": "user", "content": "Hi"}])])[0]
    assert asked == [
        [("user", "Hi")],
        [("user", "Hi"), ("assistant", answer), ("user", "And you?")],
        [("user", "Again")],
    ]
    assert shown.count("[policy]") == 2 and shown.count("[reference]") == 2  # from /compare on
    assert "no command /nonsense; there are /reset, /compare and /quit" in shown
    assert answer in capsys.readouterr().out  # streamed
    assert shown.count(f"(cut at {speaker.longest} tokens; --max-new-tokens lets it say more)") >= 1
    assert next(lines) == "never read"


def test_a_file_of_prompts_has_the_columns_of_the_recipe_s_data(trained, tmp_path):
    from toolkit.recipes.talk import _prompts

    _, recipe = trained
    asked = recipe.values["data"] | {"columns": {"prompt": "question"}}
    speaker = talk.Speaker.of_run(replace(recipe, values={**recipe.values, "data": asked}), max_new_tokens=2)
    path = tmp_path / "ask.csv"
    path.write_text("question,topic\nCapital?,towns\n")
    texts, ids = _prompts(speaker, (), path, 5)
    assert texts == ["Capital?"] and ids == [speaker.prompt_ids([{"role": "user", "content": "Capital?"}])]
    path.write_text("prompt,topic\nRiver?,towns\n")  # and those that every file may have
    assert _prompts(speaker, (), path, 5)[0] == ["River?"]


def test_a_conversation_ends_with_the_input(trained):
    def closed(_):
        raise EOFError

    talk.converse(talk.Speaker.of_run(trained[1]), read=closed, write=lambda _: None)


def test_a_streamed_answer_is_the_answer(trained):
    _, recipe = trained
    speaker = talk.Speaker.of_run(recipe, temperature=0.0, max_new_tokens=5)
    ids = speaker.prompt_ids([{"role": "user", "content": "Hi"}])

    class Kept(TextStreamer):
        text = ""

        def on_finalized_text(self, text, stream_end=False):
            self.text += text

    kept = Kept(recipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    assert speaker.answer([ids], streamer=kept) == [kept.text]


def test_export_as_adapter_and_as_checkpoint(trained, tmp_path):
    folder, recipe = trained
    done = command_here("export", "chat", tmp_path / "adapter", cwd=folder)
    assert done.returncode == 0, done.stderr
    merged = command_here("export", "chat", tmp_path / "merged", "--merge", cwd=folder)
    assert merged.returncode == 0 and "the logits differ" in merged.stdout, merged.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([tokenizer("Hello there")["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(recipe.base_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        untouched = base(input_ids=ids).logits.float()
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits.float()
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert whole.dtype is torch.bfloat16 and not hasattr(whole.config, "quantization_config")
        merged_logits = whole.eval()(input_ids=ids).logits.float()
    error = (merged_logits - adapted).abs().max()
    assert error < 0.05 * (adapted - untouched).abs().max()
    assert whole.generation_config.temperature == 0.6  # the checkpoint's own, as it came
    again = command_here("export", "chat", tmp_path / "merged", "--merge", cwd=folder)
    assert again.returncode == 1 and "is not empty. Name a new one: toolkit export RUN FOLDER" in again.stderr


def test_nothing_is_merged_into_four_bits(trained):
    _, recipe = trained
    base = load_base(recipe.base_path, quantization=recipe.quantization())
    with pytest.raises(AdapterError, match="never merged into a quantised base"):
        merge_adapter(base, finished.policy_folder(recipe), torch.tensor([[3, 4, 5]]))


def test_the_difference_of_a_merge_is_measured(trained):
    _, recipe = trained
    base = load_base(recipe.base_path, dtype="float32")
    merged = merge_adapter(base, finished.policy_folder(recipe), torch.tensor([[3, 4, 5, 6]]))
    assert merged.largest < 1e-4 * merged.scale and merged.agreement == 1.0
    with torch.no_grad():
        logits = merged.model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    assert float(logits.abs().max()) == pytest.approx(merged.scale, rel=1e-3)


def test_a_prompt_that_the_data_cannot_take_is_an_error_not_an_end(trained):
    doubling = recipes.load("doubling")
    with pytest.raises(ValueError, match="not in the vocabulary"):
        doubling.task.prompt_ids([{"role": "user", "content": "What is 2 × 5487?"}])
    assert not doubling.task.chats
