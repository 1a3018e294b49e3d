"""A trained policy written for other tools: its adapter, or that merged into its base, with tokenizer and README."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from toolkit.disk import as_the_umask_says, copy_contents, missing, read_object, remove_empty, write_whole, writing
from toolkit.errors import DataError, ToolkitError
from toolkit.inference.export_card import write_card
from toolkit.inference.saved_run import policy_folder, trained_sampler, warn_of_another_base
from toolkit.models import (
    Merged,
    load_base,
    merge_adapter,
    name_base,
    positions_of,
    read_tensors,
    resolved,
    save_tokenizer,
)
from toolkit.spec.recipe import Recipe

_POSITIONS = 64  # tokens of the text on which a merged checkpoint is compared, at most


@contextmanager
def _filling(output: Path) -> Iterator[Path]:
    """Inside, a new or empty folder is written, which can be: a merged model would be lost after minutes. Where that
    fails, it is empty again, or gone with the folders above it that were made."""
    if output.is_dir() and any(output.iterdir()):
        raise ToolkitError(f"{output} is not empty.", remedy="Name a new folder.")
    made = missing(output)
    try:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output) as file:
                file.write(b" ")
        yield output
    except BaseException:
        for path in output.iterdir() if output.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        remove_empty(made)
        raise


def export_adapter(recipe: Recipe, output: str | Path) -> Path:
    """Copy the policy's adapter with the tokenizer into an empty folder: a PEFT folder for whoever has the base.

    It names the base that the run has here, a folder by its whole path.
    """
    policy, base = policy_folder(recipe), Path(recipe.base_path).expanduser()
    with _filling(Path(output)) as folder:
        read_tensors(policy)
        with writing(folder):
            copy_contents(policy, folder, leaving=Path.is_symlink)  # whose target nobody has asked to be given away
            name_base(folder, str(base.resolve()) if base.is_dir() else recipe.base_path)
            _write_beside(recipe, folder, merged=False)
    return folder


def export_merged(recipe: Recipe, output: str | Path) -> tuple[Path, str]:
    """Write the policy into an empty folder: its adapter merged into the base in `base.dtype`, unquantised.

    Returns:
        The folder, and a sentence on how far the merged logits are from those of base and adapter apart, and of the
        policy on the quantised base on which it was trained, if that can be had here.

    Raises:
        AdapterError: merged, the adapter gives another model.
    """
    policy, dtype = policy_folder(recipe), resolved(recipe.base.dtype)
    with _filling(Path(output)) as folder:
        read_tensors(policy)
        probe, of = _probe(recipe)
        merged = None
        with suppress(torch.OutOfMemoryError):  # a card that holds the base in 4 bits need not hold it whole
            merged = _merged(recipe, policy, dtype, probe)
        if merged is None:
            merged = _merged(recipe, policy, dtype, probe, device=torch.device("cpu"))
        with writing(folder):
            _save(merged.model, folder)
            _write_beside(recipe, folder, merged=True)
    likeliest = merged.logits.argmax(-1).cpu()
    probe = probe[: likeliest.shape[1]]
    told = (
        f"merged in {dtype}: over {len(probe)} {of} the logits differ from those of the base with "
        f"its adapter unmerged by at most {merged.largest:.3g} (the largest logit is {merged.scale:.3g}), and the most "
        f"likely token is the same at {merged.agreement:.1%} of them"
    )
    del merged  # before the base comes in 4 bits
    if recipe.quantization() is not None:
        try:
            agreement = f"{_agreement_on_quantised(recipe, probe, likeliest):.1%}"
            told += f"; it is that of the trained policy, on the quantised base, at {agreement}"
        except (ToolkitError, torch.OutOfMemoryError) as error:  # the checkpoint is written, and whole
            reason = str(error) if isinstance(error, ToolkitError) else "the GPU's memory does not suffice for it"
            told += f"; what the policy on the quantised base says is not known: {reason}"
    return folder, told


def _probe(recipe: Recipe) -> tuple[list[int], str]:
    """Tokens on which a merged checkpoint is compared, and what they are."""
    try:
        probe = [token for row in recipe.task.prompts("test")["input_ids"] for token in row]
        return probe[:_POSITIONS], "tokens of held-out prompts"
    except DataError:  # whose file need not be where a run is used
        known = sorted(recipe.tokenizer.get_vocab().values())
        probe = known[:: max(1, len(known) // _POSITIONS)]
        return probe[:_POSITIONS], "tokens of the vocabulary, since the data cannot be read here,"


def _agreement_on_quantised(recipe: Recipe, probe: list[int], likeliest: torch.Tensor) -> float:
    """The share of the tokens of `probe` at which the policy as trained has the same likeliest one, int64 (1, L)."""
    roles = trained_sampler(recipe, compare=False).roles
    ids = torch.tensor([probe], device=roles.device)
    with roles.role("policy"), roles.autocast(), torch.no_grad():
        same = roles(input_ids=ids).logits.argmax(-1).cpu() == likeliest
    return float(same.float().mean())


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Write a model with its generation settings as they came: transformers 5.17 loads some, as a temperature
    without `do_sample`, that it refuses to save."""
    own = model.generation_config
    if own is not None:
        model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    if own is not None:
        own.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    config = read_object(folder / CONFIG_NAME) or {}
    if earlier := _as_before_version_5(config):
        write_whole(folder / CONFIG_NAME, json.dumps({**config, **earlier}, indent=2, sort_keys=True) + "\n")
    as_the_umask_says(folder.iterdir())


def _as_before_version_5(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions under the names that transformers 4 reads, and what is built on it; version 5 reads both.

    Without them every Llama has a `rope_theta` of 10,000 there, silently. Types with other names than most (GPT-NeoX),
    or with positions that differ by layer (Gemma 3, OLMo 3), had names of their own, and get none here.
    """
    rotary = config.get("rope_parameters")
    others = str(config.get("model_type")).startswith("gpt_neox")
    if others or not isinstance(rotary, dict) or not isinstance(rotary.get("rope_theta"), int | float):
        return {}
    if rotary.get("rope_type") == "longrope" and config.get("model_type") == "phi3":  # whose reader takes no other key
        factors = {name: rotary[name] for name in ("short_factor", "long_factor")}
        named = {name: rotary[name] for name in ("rope_theta", "partial_rotary_factor") if name in rotary}
        return {**named, "rope_scaling": {"type": "longrope", **factors}}
    scaling = {name: value for name, value in rotary.items() if name not in ("rope_theta", "partial_rotary_factor")}
    earlier = {name: rotary[name] for name in ("rope_theta", "partial_rotary_factor") if name in rotary}
    return earlier | ({} if scaling.get("rope_type", "default") == "default" else {"rope_scaling": scaling})


def _write_beside(recipe: Recipe, folder: Path, *, merged: bool) -> None:
    base = recipe.base
    save_tokenizer(recipe.tokenizer, folder, recipe.base_path, revision=base.revision, template=base.chat_template)
    write_card(recipe, folder, merged=merged)


def _merged(
    recipe: Recipe, policy: Path, dtype: str, probe: list[int], *, device: torch.device | None = None
) -> Merged:
    named = {"revision": recipe.base.revision, "trust_remote_code": recipe.base.trust_remote_code}
    model = load_base(recipe.base_path, device=device, dtype=dtype, **named)
    warn_of_another_base(recipe, model)  # of a run in 4 bits when the policy on the quantised base is read
    ids = torch.tensor([probe[: positions_of(model.config)]], device=model.device)
    return merge_adapter(model, policy, ids)
