"""A random Llama with a byte tokenizer, recipes on it, and the command line as a user calls it."""

import contextlib
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.several import context
from toolkit import recipes
from toolkit.cli import app
from toolkit.runs import process, stages
from toolkit.runs.folder import claim, finish
from toolkit.runs.owned import begin
from toolkit.trainers.resume import ResumableTrainer

REPOSITORY = Path(__file__).parents[1]
PAIRS = REPOSITORY / "data" / "preferences_example.jsonl"
QUERIES = REPOSITORY / "data" / "queries.json"
SMALL_DOUBLING = [
    "sft.max_steps=2", "reward.max_steps=2", "ppo.max_steps=2", "ppo.per_device_train_batch_size=8",
    "data.validation_size=8", "data.test_size=8", "base.config.n_layer=1", "ppo.num_ppo_epochs=1",
]  # fmt: skip


def _typed(arguments, cwd, here=False):
    """What a shell does with `toolkit …`; what is said goes to files. The stages that it needs run `here`, or not."""
    if sys.platform != "win32":
        os.setsid()
    os.chdir(cwd)
    os.environ["COLUMNS"] = "200"
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        with open(f"{name}.txt", "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["toolkit", *arguments]
    with stages_here() if here else contextlib.nullcontext():
        app(prog_name="toolkit")


def begun(*arguments, cwd, here=False):
    """A command in a process of its own, the leader of its group; the stages that it needs in that one if `here`."""
    process = context().Process(target=_typed, args=(arguments, cwd, here))
    process.start()
    return process


def ended(process, cwd):
    """What it comes to."""
    process.join()
    said = [(cwd / f"{name}.txt").read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess("toolkit", process.exitcode, *said)


def command_here(*arguments, cwd="."):
    """The same in this process, seconds faster: for what does not depend on a process of its own."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": "200"})
    escaped = isinstance(done.exception, Exception)  # Python ends with a traceback
    said = done.stderr + ("".join(traceback.format_exception(done.exception)) if escaped else "")
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, said)


class _Here:
    """Stands for the process of `python -m toolkit …`, which this one does in its place."""

    def __init__(self, command, env=None):
        with pytest.MonkeyPatch.context() as patch:  # the folder is the one's that needs it, as it is to a child
            patch.setattr(stages, "at_work", lambda *given: contextlib.nullcontext(False))
            self.code = app(command[command.index("toolkit") + 1 :], standalone_mode=False) or 0

    def poll(self):
        return self.code


@contextlib.contextmanager
def stages_here():
    """Inside, what a stage needs runs in this process, seconds faster: for what does not depend on one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(Popen=_Here))
        yield


class Stop(Exception):
    """Stands for whatever ends a process."""


def cut_short(recipe, stage, at, **way):
    """Run a stage until a checkpoint of step `at` is there, and no further."""
    save = ResumableTrainer.save_checkpoint

    def stops(self):
        folder = save(self)
        if self.state.global_step == at:
            raise Stop
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableTrainer, "save_checkpoint", stops)
        with pytest.raises(Stop):
            stages.run(recipe, stage, **way)


def finished(recipe, *names):
    """Stand-ins for finished stages with files of all kinds; what they hold is not read here."""
    for name in names:
        claim(recipe, name)
        folder = recipe.stage_folder(name)
        (folder / "policy").mkdir()
        (folder / "policy" / "adapter_model.safetensors").write_bytes(b"weights of the old one")
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        finish(folder, {"stage": name, "mark": "old"})
    begin(recipe.folder / "eval")
    (recipe.folder / "eval" / "result.json").write_text("{}")
    (recipe.folder / "eval" / "judge.py").write_text("mine")


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<pad>", "<s>", "</s>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    return tokenizer


def llama2_tokenizer():
    """The shape of Llama 2's: a word begins with ▁, whose space the decoder leaves out at the beginning of a text."""
    words = ["<unk>", "<s>", "</s>", "▁Name", "▁a", "▁colour", "▁red", "dish", "▁"]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(words)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def llama3_tokenizer():
    """The shape of Llama 3's: its special tokens and template, two ends, and no pad token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, *special])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", len(alphabet))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        extra_special_tokens=special[1:4],
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    return tokenizer


def save_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, **changes) -> Path:
    """A random Llama for this tokenizer as a checkpoint folder."""
    torch.manual_seed(0)
    values = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**values, **changes}))
    # Real checkpoints sample by settings of their own, which must not leak into rollouts.
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat_recipe(folder, checkpoint, *overrides, name="chat", **sections):
    values = {
        "about": "test",
        "base": {
            "model": str(checkpoint),
            "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        },
        "data": {"task": "preferences", "train": str(PAIRS), "validation": str(PAIRS), "max_validation_rows": 6},
        "adapters": {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value", "reward")},
        "reward": {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"},
        "ppo": {
            "max_steps": 2,
            "num_ppo_epochs": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "response_length": 6,
            "save_strategy": "no",
            "logging_steps": 1,
        },
    }
    values = {**values, **sections}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return recipes.load(path, *overrides, runs_dir=folder / "runs")


def texts(report):
    """The problems of a check as a person reads them."""
    return tuple(problem.text() for problem in report.problems)
