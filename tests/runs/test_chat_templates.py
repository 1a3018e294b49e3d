"""Tokenizers of today's chat models through the front door: recipe, check, sft and ppo on a tiny model."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from tests.tiny_models import lora
from tests.tiny_runs import PAIRS, byte_tokenizer, chat_recipe, llama3_tokenizer, save_llama
from toolkit.data import PromptCollator, PromptEncoder, Rollout
from toolkit.errors import RecipeError, ToolkitError
from toolkit.inference.export import export_adapter
from toolkit.inference.saved_run import open_run
from toolkit.models import SharedBase, load_base, save_role
from toolkit.runs import build, stages
from toolkit.runs.check import check

QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}{{ bos_token }}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.last %}{{ system }}{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
RULES = {"kind": "rules", "rules": [{"rule": "no_comma"}]}
ASKED, BRIEF = "What is the capital of France?", "Be brief."
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
PROMPT = {  # by template and system message: what the policy is to read
    ("llama3", None): "<|begin_of_text|>" + HEADER.format("user", ASKED) + "<|eot_id|>"
                      + HEADER.format("assistant", ""),
    ("llama3", BRIEF): "<|begin_of_text|>" + HEADER.format("system", BRIEF) + "<|eot_id|>"
                       + HEADER.format("user", ASKED) + "<|eot_id|>" + HEADER.format("assistant", ""),
    ("qwen", None): "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
                    f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
    ("qwen", BRIEF): f"<|im_start|>system\n{BRIEF}<|im_end|>\n"
                     f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
    ("qwen", ""): f"<|im_start|>system\n<|im_end|>\n<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
    ("llama3", ""): "<|begin_of_text|>" + HEADER.format("system", "") + "<|eot_id|>"
                    + HEADER.format("user", ASKED) + "<|eot_id|>" + HEADER.format("assistant", ""),
    ("mistral", ""): f"<s>[INST] \n\n{ASKED}[/INST]",
    ("mistral", None): f"<s>[INST] {ASKED}[/INST]",
    ("mistral", BRIEF): f"<s>[INST] {BRIEF}\n\n{ASKED}[/INST]",
}  # fmt: skip


def tokenizer_of(kind):
    """With the special tokens and the template of a family; Llama 3's has no pad token."""
    if kind == "llama3":
        return llama3_tokenizer()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"qwen": QWEN, "mistral": MISTRAL}[kind]
    if kind == "qwen":  # which has no bos
        tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
        tokenizer.pad_token, tokenizer.bos_token = "<pad>", None
    return tokenizer


@pytest.fixture(scope="module", params=["llama3", "qwen", "mistral"])
def family(request, tmp_path_factory):
    """Its name and a checkpoint, whose embeddings are more than the tokens, as Qwen's and Llama's are."""
    tokenizer = tokenizer_of(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save_llama(folder, tokenizer, vocab_size=len(tokenizer) + 57)


def made(family, folder, system, **changes):
    sections = {
        "data": {"task": "preferences", "train": str(PAIRS), "validation": str(PAIRS), "max_validation_rows": 4},
        "adapters": {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value")},
        "reward": None,
        "sft": {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no"},
        "scorer": {"kind": "function", "function": "toolkit.rewards.rules:plain_words"},
    }
    if system is not None:
        sections["data"]["system"] = system
    return chat_recipe(folder, family[1], "ppo.max_steps=1", **sections | changes)


@pytest.mark.parametrize("system", [None, BRIEF, ""])
def test_the_policy_reads_the_template_and_nothing_else(family, system, tmp_path):
    recipe = made(family, tmp_path, system)
    encoded = recipe.task.prompt_ids([{"role": "user", "content": ASKED}])
    assert recipe.tokenizer.decode(encoded) == PROMPT[family[0], system]
    row = next(row for row in recipe.task.prompts("train") if ASKED in row["prompt"])
    assert row["input_ids"] == encoded and row["prompt"] == PROMPT[family[0], system]


def test_check_sft_and_ppo(family, tmp_path):
    recipe = made(family, tmp_path, None if family[0] == "llama3" else BRIEF)
    check(recipe).raise_problems()
    for stage in ("sft", "ppo"):
        result = stages.run(recipe, stage)
    tokenizer, end = recipe.tokenizer, recipe.tokenizer.eos_token_id
    assert tokenizer.pad_token_id is not None
    rows = recipe.task.demonstrations("train")
    assert all(row["input_ids"][-1] == end == row["labels"][-1] for row in rows)  # one end, and no newline after it
    assert result["before"].keys() == result["after"].keys() >= {"score", "kl", "eos_share"}
    weights = recipe.stage_folder("sft") / "policy" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])  # the reference is this
    with pytest.raises(ToolkitError, match=r"sft: policy/adapter_model.safetensors has \d+ bytes, and had"):
        open_run(recipe.run, runs_dir=recipe.runs_dir)


def test_an_adapter_that_trl_taught_conversations_is_read_where_it_was_taught(family, tmp_path):
    """In ChatML that is a line break behind the end. What TRL reads is the oracle: its own model, on its own ids."""
    taught = tmp_path / "trl"
    settings = {"max_steps": 1, "learning_rate": 1e-1, "bf16": False, "report_to": "none", "save_strategy": "no"}
    tokenizer = AutoTokenizer.from_pretrained(family[1])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    asked = [{"role": "user", "content": ASKED}]
    pairs = {
        name: [[*asked, {"role": "assistant", "content": text}]] * 2
        for name, text in (("chosen", "Paris."), ("rejected", "I do not know."))
    }
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(family[1], num_labels=1),
        args=RewardConfig(output_dir=str(taught), use_cpu=True, gradient_checkpointing=False, **settings),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(str(taught))
    (row,) = trainer.train_dataset.select([0])["chosen_ids"]
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(input_ids=torch.tensor([row])).logits[0]

    base, start = {"model": str(family[1]), "dtype": "float32"}, {"reward": str(taught)}
    here = made(family, tmp_path, None, sft=None, scorer=None, base=base, start=start)
    ppo = here.ppo_trainer()
    prompt, end = here.task.prompt_ids(asked), here.tokenizer.eos_token_id
    text = " Paris." if family[0] == "mistral" else "Paris."  # whose template has the space
    said = [*here.tokenizer.encode(text, add_special_tokens=False), end]
    ended = Rollout(["?"], ["Paris."], [prompt], [said], [True])
    torch.testing.assert_close(ppo.reward(ended), expected, rtol=1e-3, atol=1e-5)
    # Nothing is written behind a response that the limit has cut.
    cut = Rollout(["?"], ["Paris."], [prompt], [said[:-1]], [False])
    with torch.no_grad():
        of_cut = trainer.model(input_ids=torch.tensor([prompt + said[:-1]])).logits[0]
    torch.testing.assert_close(ppo.reward(cut), of_cut, rtol=1e-3, atol=1e-5)
    assert (family[0] == "qwen") is bool((expected - of_cut).abs() > 1e-2)  # else its end is pad, and passed over


def test_a_template_that_leaves_the_answer_out_closes_none(family):
    tokenizer = AutoTokenizer.from_pretrained(family[1])
    behind = {"llama3": ["<|eot_id|>"], "qwen": ["<|im_end|>", "Ċ"], "mistral": ["</s>"]}[family[0]]
    assert tokenizer.convert_ids_to_tokens(PromptEncoder(tokenizer).closing()) == behind
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert PromptEncoder(tokenizer).closing() == []
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert PromptEncoder(tokenizer).closing() == []


def test_no_token_without_a_text_of_its_own_is_an_end(family, tmp_path):
    """The embeddings that no token stands for can be sampled from random weights; they read as nothing."""
    trainer = made(family, tmp_path, None, sft=None).ppo_trainer()
    batch = PromptCollator(trainer.processing_class.pad_token_id)([{"input_ids": [5, 6, 7]}])
    tokens = len(trainer.processing_class)
    assert trainer.roles.causal_lm.get_input_embeddings().weight.shape[0] == tokens + 57
    trainer.roles.generate = lambda ids, *_, **__: ids.new_tensor(
        [[tokens + 3, 8, trainer.processing_class.eos_token_id]]
    )
    responses = trainer.generate(batch)
    assert responses.lengths == [3] and responses.ended == [True]
    assert responses.responses == [trainer.processing_class.decode([8])]


@pytest.mark.parametrize("first", ["", "{%- set enable_thinking = false %}\n"])
def test_a_template_that_thinks_is_told_of_until_it_does_not(first, tmp_path):
    """As Qwen3's: the switch is an argument, which nothing gives."""
    tokenizer = tokenizer_of("qwen")
    shut = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    tokenizer.chat_template = first + QWEN.replace("assistant\n{% endif %}", f"assistant\n{shut}{{% endif %}}")
    save_llama(tmp_path / "base", tokenizer, vocab_size=len(tokenizer))
    rule = {"kind": "function", "function": "builtins:len"}
    recipe = chat_recipe(tmp_path, tmp_path / "base", scorer=rule, reward=None)
    told = [note.wrong for note in check(recipe).notes if "thinks before it answers" in note.wrong]
    assert len(told) == (not first)
    assert recipe.task.prompts("train")["prompt"][0].endswith("</think>\n\n" if first else "assistant\n")


# ---------------------------------------------------------------------- base.chat_template


def test_a_run_has_the_template_that_its_recipe_names(tmp_path, checkpoint, stages_here):
    """From a file beside the recipe, which the run has no need of any more; an export has it, too."""
    (tmp_path / "mine.jinja").write_text(QWEN)
    base = {"model": str(checkpoint), "chat_template": "mine.jinja"}
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.max_steps=1", base=base, reward=None, scorer=RULES)
    assert recipe.tokenizer.chat_template == QWEN != byte_tokenizer().chat_template
    stages.run(recipe, "ppo")
    (tmp_path / "mine.jinja").unlink()
    used = open_run("chat", runs_dir=tmp_path / "runs")
    (ids,) = used.task.prompts_of([ASKED])["input_ids"]
    assert used.tokenizer.decode(ids) == PROMPT["qwen", None]
    exported = export_adapter(used, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(exported).chat_template == QWEN
    assert json.loads((exported / "tokenizer_config.json").read_text()).get("chat_template", QWEN) == QWEN
    again = chat_recipe(
        tmp_path, checkpoint, f"base.chat_template={exported}", base=base, reward=None, scorer=RULES, name="again"
    )
    assert again.tokenizer.chat_template == QWEN  # a folder that has one


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.jinja", r'base.chat_template: "nowhere.jinja" cannot be read: .*No such file'),
        ("empty.jinja", r'base.chat_template: there is no chat template in "empty.jinja". Name a file like'),
        (
            "of_a_key.jinja",
            r'base.chat_template: the chat template in "of_a_key.jinja" has a "\$\{", which in a recipe',
        ),
        ("~nobody-at-all/x", "base.chat_template: .*cannot be read: .*Name a file with a Jinja template"),
        ("nul\0", "base.chat_template: .*cannot be read: .*null"),
        ("x" * 5000, "base.chat_template: .*cannot be read: .*too long"),
        ("latin.jinja", 'base.chat_template: "latin.jinja" cannot be read'),
        (".", r'base.chat_template: there is no chat template in ".". Name a file like a checkpoint'),
    ],
)
def test_what_has_no_template_is_named(given, message, tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jinja").write_text("Hello.")
    (tmp_path / "of_a_key.jinja").write_text("{{ messages }} ${seed}")
    (tmp_path / "latin.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(RecipeError, match=message):
        chat_recipe(tmp_path, checkpoint, base={"model": str(checkpoint), "chat_template": given})


def test_a_template_that_nothing_would_render_is_refused(tmp_path, checkpoint):
    base = {"model": str(checkpoint), "chat_template": QWEN}
    with pytest.raises(RecipeError, match="base.chat_template — would have no effect with chat: false"):
        chat_recipe(tmp_path, checkpoint, "data.chat=false", base=base)
    of_reward = {"task": "preferences", "train": str(PAIRS), "validation": str(PAIRS)}
    recipe = chat_recipe(tmp_path, checkpoint, "data.chat=false", base=base, reward_data=of_reward)
    assert recipe.tokenizer.chat_template == QWEN


def test_an_adapter_that_was_trained_with_another_template_is_told_of(tmp_path, checkpoint):
    base = SharedBase(load_base(str(checkpoint), device=torch.device("cpu"), dtype="float32"))
    base.add_role("policy", lora())
    save_role(base, "policy", folder := tmp_path / "adapter", pad_token_id=0, base_name="tiny")
    for beside, told in ((None, False), (byte_tokenizer().chat_template, False), (QWEN, True)):
        if beside is not None:
            tokenizer = byte_tokenizer()
            tokenizer.chat_template = beside
            tokenizer.save_pretrained(folder)
        notes = [note.text() for note in check(chat_recipe(tmp_path, checkpoint, f"start.policy={folder}")).notes]
        said = [note for note in notes if "was trained with another chat template than that of the base" in note]
        assert len(said) == told and (not told or f"base.chat_template={folder} takes that of the" in said[0])
    for as_well in (f"base.chat_template={folder}", "data.chat=false"):
        notes = check(chat_recipe(tmp_path, checkpoint, f"start.policy={folder}", as_well)).notes
        assert not any("another chat template" in note.text() for note in notes)


def test_an_end_of_turn_at_which_no_response_ends_is_told_of(tmp_path, checkpoint, caplog):
    """As of Qwen2.5's bases, whose tokenizer has the template of their chat models and another end of sequence."""
    ends = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    sections = {"base": {"model": str(checkpoint), "chat_template": ends}, "reward": None, "scorer": RULES}
    told = 'no response ends at "<s>" (id 1), with which the chat template ends a turn: a policy that was taught'
    (tmp_path / "adapter").mkdir()

    def is_told(*changes, stops=(2,), **further):
        recipe = chat_recipe(tmp_path, checkpoint, *changes, **sections | further)
        roles = SimpleNamespace(stop_token_ids=lambda tokenizer: [*stops])
        return build.end_without_stop(recipe, "ppo", roles) is not None

    start = f"start.policy={tmp_path / 'adapter'}"
    assert is_told() and is_told(start) and not is_told(stops=(2, 1))
    assert not is_told(sft={"max_steps": 1}) and not is_told(base={"model": str(checkpoint)})
    of_reward = {"task": "preferences", "train": str(PAIRS), "validation": str(PAIRS)}  # which renders the template
    assert not is_told("data.chat=false", reward={"max_steps": 1}, reward_data=of_reward)
    (tmp_path / "adapter" / "role.json").touch()  # which the toolkit's own stages write
    assert not is_told(start)
    recipe = chat_recipe(tmp_path, checkpoint, **sections)
    (note,) = (note for note in check(recipe).notes if told in note.wrong)
    assert note.field == "base.model" and 'write "eos_token_id": [2, 1] into the generation_config.json' in note.remedy
    build.placed_roles(recipe, "ppo", wanted=())
    assert caplog.messages == [note.text()]
