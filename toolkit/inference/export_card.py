"""The README.md of an exported policy: what it is, how it is prompted, what training changed, and how to load it."""

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import ModelCardData
from peft.utils import CONFIG_NAME

from toolkit.disk import read_object, write_whole
from toolkit.errors import DataError
from toolkit.models import adapter_config
from toolkit.reports import read_result, versions
from toolkit.runs.said import figures_shown
from toolkit.spec.recipe import Recipe

_SERVED_RANK = 16  # at most, unless `vllm serve` is told of more
_MESSAGE = "Why does bread rise?"
_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
base = AutoModelForCausalLM.from_pretrained("{base}"{revision})
model = PeftModel.from_pretrained(base, "{folder}")"""
_WHOLE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")"""


def write_card(recipe: Recipe, folder: Path, *, merged: bool) -> None:
    """Write it into the folder of an export, which it names as it is called.

    A base that is a folder is named without where it lies, since exports are published.
    """
    whole = Path(recipe.base_path).expanduser()
    base = whole.resolve().name if whole.is_dir() else recipe.base_path
    about = ModelCardData(
        base_model=None if whole.is_dir() else base,  # the hub wants an id of its own
        base_model_relation=None if whole.is_dir() else "finetune" if merged else "adapter",
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["ppo", "ppo-lora-toolkit"],
    )
    of_checkpoint = "" if recipe.checkpoint is None else f", its checkpoint of update {recipe.checkpoint}"
    what = "A checkpoint, made of" if merged else "A LoRA adapter for"
    commit = None if merged else (read_object(folder / CONFIG_NAME) or {}).get("revision")
    revision = f', revision="{commit}"' if commit else ""
    load = (_WHOLE if merged else _ADAPTER).format(folder=folder.resolve().name, base=base, revision=revision)
    parts = [
        f"---\n{about.to_yaml()}\n---",
        f"# {folder.resolve().name}",
        f"{what} `{base}`{' and a LoRA adapter' * merged}, trained with PPO by ppo-lora-toolkit: run `{recipe.run}`, "
        f"recipe `{recipe.name}`, seed {recipe.seed}{of_checkpoint}.",
        f"## Loading\n\n```python\n{load}\n```",
        *_served(recipe, folder, merged=merged),
        *_prompted(recipe),
        *_changed(recipe),
        "## Versions\n\n" + "\n".join(f"- {package} {number}" for package, number in versions().items()),
    ]
    write_whole(folder / "README.md", "\n\n".join(parts) + "\n")


def _served(recipe: Recipe, folder: Path, *, merged: bool) -> list[str]:
    """What vLLM has to be told of an adapter."""
    if merged:
        return []
    config = adapter_config(folder)
    if not_served := [name for name in ("use_dora", "lora_bias") if getattr(config, name)]:  # vllm#6983, #5733
        way = "export it with `--merge`"
        way += ", which needs a base whose adapted layers have biases" * config.lora_bias
        return [f"vLLM does not serve it as an adapter ({' and '.join(not_served)}): {way}."]
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    return [f"vLLM serves it with `--max-lora-rank {rank}` or more."] if rank > _SERVED_RANK else []


def _prompted(recipe: Recipe) -> list[str]:
    """The text that a message becomes; nothing for a task whose prompts are no messages."""
    with suppress(DataError):
        ids = recipe.task.typed(_MESSAGE)["input_ids"]
        text = recipe.tokenizer.decode(ids)
        fence = max(["``", *re.findall("`{3,}", text)], key=len) + "`"  # one that the text does not end
        return [f"## Prompts\n\nIn training the message “{_MESSAGE}” was\n\n{fence}text\n{text}\n{fence}"]
    return []


def _changed(recipe: Recipe) -> list[str]:
    """The figures of the run; they are of its end, and say nothing of a checkpoint."""
    if recipe.checkpoint is not None:
        return []
    result = read_result(recipe.stage_folder("ppo"))
    assert result is not None, "only finished runs are opened"
    rows = [f"| {name} | {then:.4f} | {now:.4f} |" for name, (then, now) in figures_shown(result).items()]
    table = "\n".join(["| on held-out prompts | before PPO | after |", "| --- | ---: | ---: |", *rows])
    return [f"## What PPO changed\n\n{table}"]
