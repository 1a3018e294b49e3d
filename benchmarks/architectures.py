"""Every decoder of transformers as a tiny random model, on the shared base and alone.

`python -m benchmarks.architectures` writes `docs/architectures.md`, in some minutes on one core; names of architectures
as arguments are tried and printed alone. Whatever in a configuration draws at random in training (dropout, dropped
layers, jitter) is on, as a checkpoint could have it, and adapters of random weights are on all linear layers. The
oracle is the stock model in eval mode with PEFT's own adapter, given one row at a time without padding.
"""

import argparse
import copy
import inspect
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.records import DOCS, fill_file, markdown
from toolkit.errors import ToolkitError
from toolkit.models import (
    Sequences,
    SharedBase,
    load_role,
    response_logprobs,
    response_values,
    save_role,
    sequence_logits,
)

PAGE = DOCS / "architectures.md"
BEGIN, END = "made by python -m benchmarks.architectures", "end of what was made"
RIGHT = 1e-4
"""How far two computations of one thing in float32 may be apart, as a share of the largest number."""
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HIDDEN, _HEADS, _VOCABULARY, _INNER, _POSITIONS = 32, 4, 99, 64, 64
# By the names that configurations have for them. Each is given those that its class knows.
_TINY: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim", "lru_width"), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads",), _HEADS),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), _INNER),
    **dict.fromkeys(("encoder_ffn_dim", "mlp_hidden_size", "d_inner", "dff", "dim_ff"), _INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), _POSITIONS),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), _VOCABULARY),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),  # large, so that adapters and positions matter
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("num_memory_blocks", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "block_size"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 32),
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "v_head_dim", "rotary_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "state_size", "chunk_size"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "time_step_rank", "conv_kernel"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    "linear_num_value_heads": 4,
    "num_kv_shared_layers": 0,
    "attention_types": [[["global", "local"], 1]],
    "is_decoder": True,
}
# What cannot be known by name. Multi-head latent attention has keys for every head.
_MLA = {"num_key_value_heads": 4, "head_dim": None}
_INDEXED = {**_MLA, "index_head_dim": 8, "index_n_heads": 2}
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu", "glm4_moe_lite", "axk1", "minicpm3", "sarvam_mla"), _MLA),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2"), _INDEXED),
    "dory": {"n_input_layers": 1, "n_output_layers": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "hrm_text": {"initializer_range": 0.02},  # it goes round and round, and rounding grows
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "diffllama": {"attention_dropout": 0.0},  # it refuses another
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
}
NOISE = 0.2
_LARGEST = 3_000_000
# Layers that never give an adapter a gradient, with which it is refused.
_INDEXER = ["weights_proj", "wk", "wq_b"]
_LEFT_OUT = {
    **dict.fromkeys(("hy_v4", "deepseek_v32", "glm_moe_dsa", "axk2"), _INDEXER),
    "jamba": ["dt_proj"],
}
PROMPTS, RESPONSES = [[3, 14, 9], [3, 30, 31, 32, 33]], [[12, 13, 5], [20, 21, 22, 23]]
_WEIGHTS = torch.linspace(0.5, 2.0, 8).view(2, 4)


class NotTiny(Exception):
    """An architecture of which these settings make no small model."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of two layers and some ten thousand weights; a `NotTiny` where there is none."""
    owner = CONFIG_MAPPING[kind]
    known = {*inspect.signature(owner).parameters, *owner.attribute_map}
    if "text_config" in known:
        raise NotTiny("it reads more than text")
    values = {name: value for name, value in _TINY.items() if name in known}
    for name, other in owner.attribute_map.items():
        if name in values and other in values:
            del values[name]
    values = {**values, **_CHANGES.get(kind, {}), **changes}
    return owner(**_SPECIAL, **{name: value for name, value in values.items() if value is not None})


def tiny_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model in float32 and eval mode, whose configuration has noise in training; a `NotTiny` without one."""
    try:
        config = tiny_config(kind)
        noisy = {n for n, v in vars(config).items() if isinstance(v, float) and ("drop" in n or "jitter" in n)}
        config = tiny_config(kind, **dict.fromkeys(noisy - _CHANGES.get(kind, {}).keys(), NOISE), **changes)
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config)
        if sum(p.numel() for p in outline.parameters()) > _LARGEST:
            raise NotTiny("these settings do not make it small")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            model(input_ids=torch.tensor(PROMPTS[1:]))
    except NotTiny:
        raise
    except Exception as error:  # of a model that nobody has made of these settings before
        raise NotTiny(f"{type(error).__name__}: {_first_line(error)}") from error
    return model


@dataclass
class Row:
    """What was found of one architecture: how far apart, by what was compared; or why it was refused."""

    kind: str
    model: str
    apart: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    failed: str = ""

    @property
    def is_right(self) -> bool:
        close = all(value <= RIGHT for value in self.apart.values())  # not where one is NaN
        return close and not (self.refused or self.failed)


def examine(kind: str, **changes: Any) -> Row:
    """One architecture on the shared base, against the same model alone. Raises `NotTiny`."""
    model = tiny_model(kind, **changes)
    row, alone = Row(kind, type(model).__name__), copy.deepcopy(model)
    try:
        base = with_roles(model)
        row.apart = dict(_compared(base, alone))
        try:
            base.gradient_checkpointing_enable()
        except ToolkitError:
            pass  # its cell says that there is none
        else:
            row.apart["gradients, checkpointing"] = _gradients_apart(base, alone)
    except ToolkitError as error:
        said = " ".join(problem.text() for problem in error.problems)
        row.refused = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/", "", said)  # where `_compared` has saved
    except Exception as error:  # which a user would see as a traceback
        row.failed = f"{type(error).__name__}: {_first_line(error)}"
    return row


def with_roles(model: PreTrainedModel) -> SharedBase:
    """A base with adapters and heads of random weights."""
    base = SharedBase(model)
    for role in ("policy", "value", "reward"):
        base.add_role(role, _lora(model))
    base.add_role("reference")
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for role in ("policy", "value", "reward"):
            for parameter in base.parameters_of(role):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=noise))
    base.train_roles("policy", "value")
    return base


def _lora(model: PreTrainedModel) -> LoraConfig:
    named: dict[str, Any] = {"exclude_modules": _LEFT_OUT.get(model.config.model_type)}
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", **named)


def _compared(base: SharedBase, alone: PreTrainedModel) -> Iterator[tuple[str, float]]:
    sequences = Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0, pack=base.packs_rows)
    policy = stock(base, alone, "policy")
    with torch.no_grad():
        with base.role("policy"):
            logprobs = response_logprobs(base, sequences)
        yield (
            "log-probabilities",
            _apart([(logprobs[i, : len(r)], _logprobs(policy, i)) for i, r in enumerate(RESPONSES)]),
        )
        yield "rewards", _rewards_apart(base, stock(base, alone, "reward"))
    yield "gradients", _gradients_apart(base, alone)
    yield "generation", _generation_apart(base, policy)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        again = SharedBase(copy.deepcopy(alone))
        load_role(again, "policy", save_role(base, "policy", folder, pad_token_id=0, base_name=""))
        with again.role("policy"):
            yield "saved", _apart([(response_logprobs(again, sequences), logprobs)])


def stock(base: SharedBase, alone: PreTrainedModel, role: str) -> PeftModel:
    """The stock model with an adapter of PEFT's own, of the role's weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        model = get_peft_model(copy.deepcopy(alone), _lora(alone), adapter_name=role).eval()
    for mine, theirs in zip(adapter_of(model, role), adapter_of(base, role), strict=True):
        mine.data.copy_(theirs.data)
    return model


def adapter_of(model: torch.nn.Module, role: str) -> list[torch.nn.Parameter]:
    """Weights of a role's adapter, in the order of modules."""
    own = re.compile(rf"\.lora_\w+\.{role}(\.|$)")  # a module may be called value, too
    return [p for name, p in model.named_parameters() if own.search(name)]


def _logprobs(model: PeftModel, row: int) -> Tensor:
    prompt, response = PROMPTS[row], RESPONSES[row]
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


def _states(model: PeftModel, row: int) -> Tensor:
    ids = torch.tensor([PROMPTS[row] + RESPONSES[row]])
    return model.get_base_model().base_model(input_ids=ids, use_cache=False).last_hidden_state[0]


def _rewards_apart(base: SharedBase, alone: PeftModel) -> float:
    rows = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    expected = torch.cat([base.head("reward")(_states(alone, i)[-1]) for i in range(len(rows))])
    longest, pairs = max(map(len, rows)) + 2, []
    for left in (False, True):
        fill = [longest - len(row) for row in rows]
        ids = torch.tensor([[0] * n + row if left else row + [0] * n for n, row in zip(fill, rows, strict=True)])
        mask = (ids != 0).long()
        pairs.append((sequence_logits(base, ids, mask, pad_token_id=0).squeeze(1), expected))
    return _apart(pairs)


def _gradients_apart(base: SharedBase, alone: PreTrainedModel) -> float:
    """Of policy and value, in training mode with rows packed or padded, against eval mode with one at a time."""
    sequences, apart = Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0, pack=base.packs_rows), 0.0
    readings: dict[str, Callable[[SharedBase, Sequences], Tensor]] = {
        "policy": partial(response_logprobs, chunk_size=2), "value": response_values,
    }  # fmt: skip
    for role, read in readings.items():
        own, expected = stock(base, alone, role), torch.zeros(())
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            if role == "policy":
                found = _logprobs(own, row)
            else:
                found = base.head("value")(_states(own, row)[len(prompt) - 1 : -1]).squeeze(-1)
            expected = expected + (_WEIGHTS[row, : len(response)] * found).sum()
        expected.backward()
        base.zero_grad()
        base.train()
        with base.role(role):
            (_WEIGHTS * read(base, sequences)).sum().backward()
        base.eval()
        both = [(p.grad, q.grad) for p, q in zip(adapter_of(base, role), adapter_of(own, role), strict=True)]
        pairs = [(p, q) for p, q in both if p is not None and q is not None]
        # What has no gradient is not trained, whether the stock model has one or not.
        apart = max(apart, _apart(pairs) if len(pairs) == len(both) else float("inf"))
        base.zero_grad()
    return apart


@torch.no_grad()
def _generation_apart(base: SharedBase, alone: PeftModel) -> float:
    """How far the logits of greedy tokens, decoded after left padding, are below the largest of the model alone."""
    longest, apart = max(map(len, PROMPTS)), 0.0
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    config = GenerationConfig(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=2)
    with base.role("policy"):
        tokens = base.generate(ids, (ids != 0).long(), config)
    for prompt, response in zip(PROMPTS, tokens.tolist(), strict=True):
        logits = alone(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logits[:, 2] = -torch.inf  # which min_new_tokens forbids
        taken = logits[torch.arange(4), torch.tensor(response)]
        largest = logits.max(-1).values
        apart = max(apart, float(((largest - taken) / largest.abs()).max()))
    return apart


def _apart(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of any pair, as a share of the largest number of the second ones."""
    difference = max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)
    return difference / max(float(other.detach().abs().max()) for _, other in pairs)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:160]


# ---------------------------------------------------------------------- the page


def page(rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """The tables of `docs/architectures.md`."""
    columns = ("log-probabilities", "rewards", "gradients", "gradients, checkpointing", "generation", "saved")
    right = [row for row in rows if row.is_right]
    wrong = [row for row in rows if not row.is_right and not row.refused]
    text = [f"With transformers {version('transformers')} and peft {version('peft')}.", "", "## Right", ""]
    cells = [[f"`{row.kind}`", *(_cell(row, column) for column in columns)] for row in right]
    text += [markdown(("architecture", *columns), cells), ""]
    if wrong:
        cells = [[f"`{row.kind}`", *(_cell(row, column) for column in columns), row.failed] for row in wrong]
        text += ["## Wrong", "", markdown(("architecture", *columns, "error"), cells), ""]
    refused = [[f"`{row.kind}`", row.refused] for row in rows if row.refused]
    text += ["## Refused", "", markdown(("architecture", "what it is refused with"), refused), ""]
    names = ", ".join(f"`{kind}`" for kind in sorted(left_out))
    return "\n".join([*text, f"Not tried, since the settings here make no tiny decoder of them: {names}."])


def _cell(row: Row, column: str) -> str:
    if column in row.apart:
        return "0" if row.apart[column] == 0 else f"{row.apart[column]:.0e}"
    return "none, refused"


def main() -> None:
    parser = argparse.ArgumentParser(description="Tiny models of all architectures, on the shared base and alone.")
    parser.add_argument("kinds", nargs="*", help="architectures, by transformers' names; all if none is given")
    asked = parser.parse_args().kinds
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows, left_out = [], {}
    for kind in asked or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            row = examine(kind)
        except NotTiny as reason:
            left_out[kind] = str(reason)
            print(f"{kind:24} not tried: {reason}", flush=True)
            continue
        rows.append(row)
        said = row.refused or row.failed + " ".join(f"{name} {value:.0e}" for name, value in row.apart.items())
        print(f"{kind:24} {'right' if row.is_right else 'refused' if row.refused else 'WRONG':8} {said}", flush=True)
    if not asked:
        fill_file(PAGE, BEGIN, END, page(rows, left_out))
    raise SystemExit(1 if any(not row.is_right and not row.refused for row in rows) else 0)


if __name__ == "__main__":
    main()
