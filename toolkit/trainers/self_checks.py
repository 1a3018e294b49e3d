"""Checks at the start of training. Each raises on a mistake that would otherwise train the wrong thing in silence."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from toolkit import processes
from toolkit.errors import ConfigError, DataError, SelfCheckError
from toolkit.memory import memory
from toolkit.models import LENGTH_MULTIPLE, SharedBase, check_records, embeddings_needed, in_tf32
from toolkit.trainers.ppo_config import PPOConfig

_IN_GRAPHS = 4  # tokens: of the prompt, of a plain pass, of one that is recorded, of one that is played back again
_ROWS_IN_GRAPHS = 9
# How far from 1 the ratio may be before the first update, as the mean of |log ratio|. Old and new
# log-probabilities come from the same kind of forward pass, but the rows of a batch differ, and with them
# the order of summation. Far below what one wrong adapter or a dropout would give.
RATIO_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_dataset(dataset: Dataset, batch_size: int) -> None:
    """The data set has the prompts' ids and fills at least one batch, for which TRL would wait for ever."""
    if "input_ids" not in dataset.column_names:
        raise DataError(f"the prompts need a column input_ids; present: {', '.join(dataset.column_names)}.")
    if len(dataset) < batch_size:
        wrong = f"{len(dataset)} prompts are fewer than one batch of {batch_size} "
        wrong += "(per_device_train_batch_size × gradient_accumulation_steps)."
        raise DataError(wrong, remedy="Add prompts or lower these.")


def check_batch(args: TrainingArguments, rows: int) -> None:
    """Raises: DataError: a pass would have no batch, and nothing be trained."""
    if args.dataloader_drop_last and rows < args.per_device_train_batch_size:
        wrong = f"true leaves out the only batch: there are {rows} rows, and per_device_train_batch_size is "
        raise DataError(f"{wrong}{args.per_device_train_batch_size}.", field="dataloader_drop_last")


def check_settings(args: PPOConfig, roles: SharedBase, eval_dataset: Dataset | None) -> None:
    """What is asked for is what the roles do, and what is to be measured is there.

    Raises:
        ConfigError: the value role is another, or another loop is asked for.
        DataError: there are no held-out prompts for an evaluation.
    """
    if (args.value == "shared") != roles.shares_value:
        of_roles = "the policy's adapter" if roles.shares_value else "an adapter or a base of its own"
        wrong = f"is {args.value}, and the value role has {of_roles}."
        raise ConfigError(wrong, field="value", remedy=f"Set {'shared' if roles.shares_value else 'separate'}.")
    if args.loop != "toolkit":
        wrong = f"is {args.loop}, and this is the toolkit's own loop."
        raise ConfigError(wrong, field="loop", remedy="Leave it out, or take stock_ppo_trainer.")
    evaluates = args.eval_strategy != IntervalStrategy.NO or args.eval_on_start
    if evaluates and eval_dataset is not None and not len(eval_dataset):
        raise DataError("there are no held-out prompts to evaluate.", remedy="Hold some out, or set eval_strategy: no.")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, base: SharedBase) -> None:
    """Tokenizer and model know the same tokens."""
    rows, tokens = base.causal_lm.get_input_embeddings().weight.shape[0], embeddings_needed(tokenizer)
    for name in ("eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        if token is None or not 0 <= token < rows:
            wrong = f"the tokenizer's {name} is {token}; the base has embeddings for 0 to {rows - 1}."
            remedy = "Use the tokenizer of the checkpoint, or name a token in its tokenizer_config.json that it has."
            if name == "pad_token_id" and token is not None:
                remedy = "Take pad_token out of its tokenizer_config.json: the end of sequence then pads."
            raise SelfCheckError(wrong, remedy=remedy)
    if tokens > rows:
        wrong = f"the tokenizer has {tokens} tokens and the base {rows} embeddings: they are not of one checkpoint."
        raise SelfCheckError(wrong)
    if base.value_model is not None:
        theirs = base.value_model.backbone.get_input_embeddings().weight.shape[0]
        if tokens > theirs:
            wrong = f"the value model has {theirs} embeddings and the tokenizer {tokens} tokens: "
            wrong += "it cannot read all that the policy writes."
            raise SelfCheckError(wrong, remedy="Take a model of the same family.")
    stops = base.checkpoint_stops
    if stops and tokenizer.eos_token_id not in stops:
        wrong = f"the tokenizer ends a response with id {tokenizer.eos_token_id} and the base with {list(stops)}: "
        wrong += "responses would not end where the base was trained to."
        remedy = f"Use the tokenizer of the checkpoint, or add {tokenizer.eos_token_id} to eos_token_id in its "
        raise SelfCheckError(wrong, remedy=f"{remedy}generation_config.json.")


@torch.no_grad()
def check_rollout_uses_policy(
    base: SharedBase,
    prompt: list[int],
    *,
    pad_token_id: int,
    merged: bool = False,
    graphs: bool = False,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """What generation samples from is the policy: it changes when the policy's adapter does.

    The adapter is changed for a few forward passes of any prompt, in contexts of `autocast`, since a region keeps the
    cast weights that it has seen, and put back. Peers sampled from the bare base for whole runs without noticing
    (verl#3821).
    """
    parameters, tokens = base.parameters_of("policy"), _IN_GRAPHS if graphs else 1
    positions, _ = base.positions
    never = base.causal_lm.get_input_embeddings().weight.shape[0]  # the first id that no token has
    prompt = prompt if positions is None else prompt[: positions + 1 - tokens]
    # Of few rows kernels are others than in a rollout: a mixture's, and those of bits.
    ids = torch.tensor([prompt] * (_ROWS_IN_GRAPHS if graphs else 1), device=base.device)
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=never, pad_token_id=pad_token_id)

    def generated() -> tuple[Tensor, Tensor]:
        """Prompt and tokens, int64 (rows, L), and what each token of a row was taken from, float32 (T, V)."""
        seen = list[Tensor]()

        def see(_: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores)
            return scores

        with base.role("policy"), autocast():
            new = base.generate(
                ids,
                torch.ones_like(ids),
                config,
                merged=merged,
                graphs=graphs,
                logits_processor=LogitsProcessorList([see]),
            )
        return torch.cat([ids, new], dim=1), torch.stack([scores[0] for scores in seen])

    _, before = generated()
    noise = torch.Generator().manual_seed(0)
    saved = [p.clone() for p in parameters]
    try:
        for parameter in parameters:  # of both signs: alike they would add up, past float16's range
            # Of wide layers less, or what the adapter adds would drown the rest, and rounding would grow with it.
            size = min(0.05, parameter.shape[-1] ** -0.5)
            parameter.add_(size * torch.randn(parameter.shape, generator=noise).to(parameter))
        rows, changed = generated()
        with base.role("policy"), base.in_eval_mode(), autocast():
            read = rows[:1, :-1]
            expected = base.logits(base.hidden_states(read, torch.ones_like(read)))[0, -len(changed) :].float()
    finally:  # Ctrl-C in a notebook would leave another policy behind
        for parameter, old in zip(parameters, saved, strict=True):
            parameter.copy_(old)
    scale = (expected[0] - before[0]).abs().max()
    off = (changed - expected).abs().amax(dim=1)
    if not (scale > 0 and off[0] <= 0.2 * scale):  # nor where they are NaN
        raise SelfCheckError("rollouts do not come from the policy's adapter: generation ignores a change of it.")
    if not off.max() <= 0.2 * scale:
        wrong = "a CUDA graph of this base samples from other logits than a forward pass over the same tokens gives."
        raise ConfigError(wrong, field="generation", remedy="Take eager or merged.")


def check_device_records(device: torch.device) -> None:
    """What the base is on has graphs."""
    if device.type != "cuda":
        wrong = f"graphs are of CUDA devices, and the base is on the {device.type.upper()}."
        raise ConfigError(wrong, field="generation", remedy="Take eager or merged.")


def check_graphs(base: SharedBase, args: PPOConfig, longest: int) -> None:
    """Where graphs are asked for, the base has them for prompts of up to so many tokens."""
    if args.decoding["graphs"]:
        prompts = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE  # as they are padded
        check_records(base.causal_lm, prompts + args.response_length)


def _nothing_to_merge() -> ConfigError:
    wrong = "merged finds no layer that the policy's adapter can be merged into: it needs plain LoRA on linear "
    wrong += "layers, and bnb_4bit_compute_dtype equal to the dtype that 4-bit layers were quantised from."
    return ConfigError(wrong, field="generation", remedy="Take eager.")


def check_can_merge(base: SharedBase, args: PPOConfig) -> None:
    """Where the policy's adapter is to be merged into a copy of the weights, it can be."""
    if args.decoding["merged"] and not base.can_merge:
        raise _nothing_to_merge()


def check_room_to_merge(base: SharedBase) -> None:
    """The policy's adapter can be merged, and there is memory for the copy of the weights that it is merged into."""
    if not (needed := base.merged_bytes):
        raise _nothing_to_merge()
    free, each = memory().available, ""
    if base.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(base.device)
        free += torch.cuda.memory_reserved(base.device) - torch.cuda.memory_allocated(base.device)
    elif (number := processes.count_here()) > 1:  # whose copies are made at the same time, in one memory
        needed, each = number * needed, f" in each of {number} processes"
    if needed > free:
        wrong = f"merged needs {needed / 1e9:.3g} GB for a copy of the weights{each}, and {free / 1e9:.3g} GB are free."
        raise ConfigError(wrong, field="generation", remedy="Take eager, or a smaller base.")


def check_in_optimizer(base: SharedBase, optimizer: torch.optim.Optimizer) -> None:
    """Every parameter of a trained role is in the optimizer, and no other is."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for role in base.trained_roles:
        trained = {id(p) for p in base.parameters_of(role)}
        if missing := len(trained - held):
            raise SelfCheckError(f'{missing} tensors of the trained role "{role}" are not in the optimizer.')
        held -= trained
    if held:
        raise SelfCheckError(f"the optimizer holds {len(held)} tensors of no trained role.")


def check_gradients(base: SharedBase, roles: Iterable[str]) -> None:
    """After the first backward passes each of these roles has gradients, and not only zeros. (An adapter that was
    inactive or frozen gets none, in silence.) They are finite: of others the step is passed over, and where they are
    clipped those of every role are 0 or no number."""
    for role in roles:
        parameters = base.parameters_of(role)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if missing := len(parameters) - len(gradients):
            wrong = f'{missing} of {len(parameters)} tensors of the trained role "{role}" got no gradient.'
            raise SelfCheckError(wrong)
        if not any(bool(g.any()) for g in gradients):
            raise SelfCheckError(f'the first gradient of the role "{role}" is zero everywhere.')


def check_ratio(base: SharedBase, args: TrainingArguments, log_ratio: Tensor, response_mask: Tensor) -> None:
    """Before the first update the policy is the one that sampled: ratio 1 at every token, up to the precision.

    Both tensors are (B, T), the first without the adapter's dropout.
    """
    computes = {base.causal_lm.dtype, *(getattr(layer, "compute_dtype", None) for layer in base.causal_lm.modules())}
    computes |= {dtype for dtype, on in ((torch.bfloat16, args.bf16), (torch.float16, args.fp16)) if on}
    if in_tf32(log_ratio.device):
        computes.add(torch.float16)
    tolerance = max(RATIO_TOLERANCE.get(dtype, 0.0) for dtype in computes)
    error = float(log_ratio[response_mask].abs().mean())
    if not error <= tolerance:
        wrong = f"before the first update log(ratio) is {error:.2e} from 0 on average, more than {tolerance:.0e}"
        raise SelfCheckError(f"{wrong}: old and new log-probabilities are not of the same policy.")
