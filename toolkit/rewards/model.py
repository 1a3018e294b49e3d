"""A reward model or classifier with a base and a tokenizer of its own as a reward callback."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from toolkit.data import Rollout, pad_rows
from toolkit.errors import RewardError
from toolkit.models import LENGTH_MULTIPLE, release_memory
from toolkit.models.base import default_device
from toolkit.rewards.classes import ClassScore, check_outputs, scores_of

Reads = Literal["conversation", "text", "pair", "response", "tokens"]
# The prompt itself: `rollout.prompts` has the policy's special tokens and template in it.
PROMPT_COLUMNS = ("messages", "prompt")
_ENDLESS = 10**6  # tokenizers say 10³⁰ where they know no limit


def read_checkpoint(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, class_column: str | None = None
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Configuration and tokenizer of a sequence classifier, without its weights.

    Raises:
        RewardError: no such checkpoint, no classifier, or one whose outputs do not fit `class_column`.
    """
    arguments: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **arguments)
        tokenizer = AutoTokenizer.from_pretrained(path, **arguments)
    except (OSError, ValueError) as error:
        raise _not_loaded(path, error) from error
    kinds = config.architectures or []
    if kinds and not trust_remote_code and not any("SequenceClassification" in kind for kind in kinds):
        raise RewardError(
            f'scorer.model: "{path}" is a {" and ".join(kinds)}, which has no head for scores. '
            "Name a checkpoint for sequence classification, as TRL's RewardTrainer saves it."
        )
    check_outputs(config.num_labels, class_column, whose=f'"{path}"')
    return config, tokenizer


def _not_loaded(path: str, error: Exception) -> RewardError:
    reason = str(error).splitlines()[0]
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        reason = "there is no such folder."
    return RewardError(
        f'scorer.model: no sequence classifier could be loaded from "{path}" ({reason}) Name a folder or hub id with '
        "safetensors weights and a tokenizer."
    )


class RewardModel:
    """Scores responses with a sequence classifier, frozen, on text that its own tokenizer encodes.

    The prompt is taken from a column of the data set: what the policy was given has the special tokens of another
    tokenizer in it. A model with the policy's own tokenizer can read the very tokens instead. The model pools as its
    own class does, so that a score is what a forward pass over that one row gives; where the configuration names no
    padding token, an id that no row of the batch has stands in.

    Args:
        model: a sequence classifier. It is put into eval mode and loses its gradients.
        tokenizer: the model's.
        reads: "conversation", the prompt and the response as an assistant's turn in the model's chat template; "text",
            the response straight after the prompt; "pair", the two as a pair of texts; "response" alone; "tokens", the
            ids of prompt and response as the policy had them, for a model with the policy's tokenizer. None is
            "conversation" where the tokenizer has a chat template, else "text".
        prompt_column: with the prompt as text or as messages; `messages` or else `prompt` if None. As a conversation a
            text is one message of the user; as a text messages are their contents, with a blank line between them.
        class_column: for a model with several outputs, the column with the wanted class, by number or name.
        class_score: "logprob" or "logit" of that class.
        max_length: tokens; the beginning of a longer text is cut off, so that the response stays. None is what the
            model takes.
        batch_size: texts a forward pass.

    Raises:
        RewardError: settings that do not fit the model.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reads: Reads | None = None,
        prompt_column: str | None = None,
        class_column: str | None = None,
        class_score: ClassScore = "logprob",
        max_length: int | None = None,
        batch_size: int = 16,
    ):
        check_outputs(model.config.num_labels, class_column, whose="the reward model")
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = copy.deepcopy(tokenizer)  # the caller's keeps its side
        self.tokenizer.truncation_side = "left"
        self.reads, self.prompt_column = checked_reads(tokenizer, reads), prompt_column
        self.class_column, self.class_score, self.batch_size = class_column, class_score, batch_size
        self.max_length = checked_length(model.config, tokenizer, max_length)
        self.truncated = 0
        """Texts that were cut so far."""

    @classmethod
    def load(
        cls,
        path: str,
        *,
        quantization: BitsAndBytesConfig | None = None,
        dtype: str = "bfloat16",
        revision: str | None = None,
        trust_remote_code: bool = False,
        device: torch.device | None = None,
        **settings: Any,
    ) -> "RewardModel":
        """From a folder or hub id.

        Args:
            path: with safetensors weights, a classification head and a tokenizer.
            quantization: as for `from_pretrained`.
            dtype: of the weights that are not quantised.
            revision: of a hub id.
            trust_remote_code: run code that comes with the checkpoint. Off unless the user says so.
            device: defaults to the first GPU, else the CPU.
            settings: of the constructor.

        Raises:
            RewardError: no such checkpoint, or one without a trained head.
        """
        arguments: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        config, tokenizer = read_checkpoint(path, class_column=settings.get("class_column"), **arguments)
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path,
                config=config,
                quantization_config=quantization,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                device_map={"": device or default_device()},
                output_loading_info=True,
                **arguments,
            )
        except (OSError, ValueError) as error:
            raise _not_loaded(path, error) from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise RewardError(
                f'scorer.model: "{path}" has no weights for {missing}: the scores would be random numbers. '
                "Name a trained classifier."
            )
        return cls(model, tokenizer, **settings)

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        rows = self._encode(rollout)
        logits = torch.zeros(len(rows), self.model.config.num_labels)
        # Rows of similar length together: less padding is computed.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            logits[part] = self._logits([rows[i] for i in part]).float().cpu()
            release_memory()
        label_ids = {str(name): int(number) for number, name in self.model.config.id2label.items()}
        return scores_of(
            logits, rollout, class_column=self.class_column, class_score=self.class_score, label_ids=label_ids
        )

    def _logits(self, rows: Sequence[dict[str, list[int]]]) -> Tensor:
        device = self.model.device
        # Rounded up, a length must not pass the last position.
        multiple = LENGTH_MULTIPLE if (self.max_length or 0) % LENGTH_MULTIPLE == 0 else 1
        # The trainer's autocast would compute in its own precision.
        with self._padding([row["input_ids"] for row in rows]) as pad, torch.autocast(device.type, enabled=False):
            inputs: dict[str, Tensor] = {}
            for name in rows[0]:
                fill = pad if name == "input_ids" else 0
                ids, mask = pad_rows([r[name] for r in rows], pad_token_id=fill, side="right", multiple=multiple)
                inputs |= {name: ids.to(device), "attention_mask": mask.to(device)}
            return self.model(**inputs).logits

    @contextmanager
    def _padding(self, rows: Sequence[Sequence[int]]) -> Iterator[int]:
        """The id to pad with: decoders pool at the last token that is another."""
        config = self.model.config.get_text_config()
        own, vocabulary = config.pad_token_id, self.model.get_input_embeddings().num_embeddings
        if own is not None and 0 <= own < vocabulary:
            yield own
            return
        used = {token for row in rows for token in row}
        config.pad_token_id = next(token for token in range(vocabulary) if token not in used)
        try:
            yield config.pad_token_id
        finally:
            config.pad_token_id = own

    # ------------------------------------------------------------------ text

    def texts(self, rollout: Rollout) -> list[tuple[str, ...]]:
        """What is read of each response: one text, or two for a pair.

        Raises:
            RewardError: the prompts lack the column, or the model's chat template refuses a conversation.
        """
        if self.reads == "response":
            return [(response,) for response in rollout.responses]
        prompts = self._prompts(rollout)
        if self.reads == "conversation":
            return [(self._conversation(p, r),) for p, r in zip(prompts, rollout.responses, strict=True)]
        plain = [p if isinstance(p, str) else "\n\n".join(message["content"] for message in p) for p in prompts]
        pairs = list(zip(plain, rollout.responses, strict=True))
        return list(pairs) if self.reads == "pair" else [(prompt + response,) for prompt, response in pairs]

    def _prompts(self, rollout: Rollout) -> Sequence[Any]:
        wanted = PROMPT_COLUMNS if self.prompt_column is None else (self.prompt_column,)
        column = next((name for name in wanted if name in rollout.columns), None)
        if column is None:
            present = ", ".join(rollout.columns) or "none"
            raise RewardError(
                f"scorer.prompt_column: the prompts have no column {' or '.join(wanted)}; present: {present}. Name the "
                "one with the prompt as text or messages, or set scorer.reads=response."
            )
        for value in rollout.columns[column]:
            if not isinstance(value, str | list) or not value:
                raise RewardError(
                    f'scorer.prompt_column: column "{column}" holds {value!r}, which is neither text nor messages.'
                )
        return rollout.columns[column]

    def _conversation(self, prompt: Any, response: str) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # Tables give every message the keys of all, and a template may take a key that is None for a value.
        messages = [{key: item for key, item in message.items() if item is not None} for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [*messages, {"role": "assistant", "content": response}], tokenize=False
                )
            )
        except TemplateError as error:
            raise RewardError(
                f"scorer.model: its chat template refuses a conversation ({error}): {messages!r}. Mend the row, or set "
                "scorer.reads=pair or text."
            ) from error

    def _encode(self, rollout: Rollout) -> list[dict[str, list[int]]]:
        rows, limit = [], self.max_length
        if self.reads == "tokens":
            whole = [[*p, *r] for p, r in zip(rollout.prompt_ids, rollout.response_ids, strict=True)]
            cut = sum(limit is not None and len(ids) > limit for ids in whole)
            rows = [{"input_ids": ids if limit is None else ids[-limit:]} for ids in whole]
        else:
            cut = 0
            for texts in self.texts(rollout):
                row = self._tokens(texts)
                if limit is not None and len(row["input_ids"]) > limit:
                    cut += 1
                    row = self._tokens(texts, truncation=True, max_length=limit)
                rows.append(row)
        if cut and not self.truncated:
            warnings.warn(
                f"{cut} of {len(rows)} texts are longer than the {self.max_length} tokens of the reward model and lose "
                "their beginning; later ones are counted (`truncated`).",
                stacklevel=3,
            )
        self.truncated += cut
        return rows

    def _tokens(self, texts: tuple[str, ...], **truncation: Any) -> dict[str, list[int]]:
        # A chat template writes the special tokens itself.
        encoded = self.tokenizer(*texts, add_special_tokens=self.reads != "conversation", verbose=False, **truncation)
        names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
        if encoded["input_ids"]:
            return {name: list(encoded[name]) for name in names}
        # An empty response alone: a model needs at least one token.
        ends = (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id, 0)
        return {name: [next(i for i in ends if i is not None) if name == "input_ids" else 0] for name in names}


def checked_reads(tokenizer: PreTrainedTokenizerBase, reads: Reads | None) -> Reads:
    """How prompt and response are put together, if nothing is said by what the tokenizer has.

    Raises:
        RewardError: a conversation, and the tokenizer has no chat template.
    """
    if reads == "conversation" and tokenizer.chat_template is None:
        raise RewardError(
            "scorer.reads: conversation needs a chat template, and the tokenizer of scorer.model has none. "
            "Use text, pair or response."
        )
    return reads or ("text" if tokenizer.chat_template is None else "conversation")


def checked_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> int | None:
    """Tokens that are read at most; None where nothing limits them.

    Raises:
        RewardError: more than the model takes.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [n for n in (positions, tokenizer.model_max_length) if isinstance(n, int) and 0 < n < _ENDLESS]
    if max_length is not None and limits and max_length > min(limits):
        raise RewardError(f"scorer.max_length: {max_length} tokens, and the model takes {min(limits)}. Lower it.")
    return max_length or min(limits, default=None)
