"""A reward model or classifier with a base and a tokenizer of its own as a reward callback."""

import copy
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit import models
from toolkit.data import Rollout, pad_rows
from toolkit.errors import NotFiniteError, Problem, RewardError, ToolkitError
from toolkit.portion import Portion
from toolkit.rewards.adapter import logits_of
from toolkit.rewards.base import Reward
from toolkit.rewards.model_text import Reads, TextScorer, conversation
from toolkit.rewards.scorer import ScorerContext, named_classes, problems_of
from toolkit.settings import setting


@dataclass(eq=False, repr=False)
class RewardModel(TextScorer):
    """Scores responses with a sequence classifier, frozen, on text that its own tokenizer encodes.

    The prompt is taken from a column of the data set: what the policy was given has the special tokens of another
    tokenizer in it. A model with the policy's own tokenizer can read the very tokens instead. The model pools as its
    own class does, so that a score is what a forward pass over that one row gives; where the configuration names no
    padding token, an id that no row of the batch has stands in.

    The model is put into eval mode and loses its gradients; `truncated` counts the texts that were cut. Raises:
    RewardError: settings that do not fit the model.
    """

    on_every_process: ClassVar[bool] = True
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    truncated: int = field(default=0, init=False)
    mean_score: float | None = field(default=None, init=False)
    """What it gives held-out responses on average; known of one that the reward stage has trained."""
    high_score: float | None = field(default=None, init=False)
    """Beyond it the model judges what it has hardly met; known likewise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        passed_over = models.positions_passed_over(self.model)
        self.reads, self.max_length = self.fitted(
            self.model.config, self.tokenizer, whose="the reward model", passed_over=passed_over
        )
        self.model.eval().requires_grad_(False)
        self.tokenizer = copy.deepcopy(self.tokenizer)  # the caller's keeps its side
        self.tokenizer.truncation_side = "left"

    @classmethod
    def load(cls, model: str, *, device: torch.device | None = None, **settings: Any) -> "RewardModel":
        """From a folder or hub id with safetensors weights, a classification head and a tokenizer.

        `device` defaults to the first GPU, else the CPU. The settings are those of a `ModelScorer`; `quantization` may
        be a `BitsAndBytesConfig`. Raises: RewardError or ModelError: no such classifier, or settings that do not fit.
        """
        return ModelScorer(model=model, **settings).load(device)

    @cached_property
    def portion(self) -> Portion:
        return Portion("the reward's batch size", self.batch_size)

    def scoring_digests(self) -> dict[str, str]:
        """SHA-256 of the first numbers of each weight that is not quantised, by the model's name and precision."""
        kept = (p for p in self.model.parameters() if p.is_floating_point() and not hasattr(p, "quant_state"))
        dtype = str(self.model.dtype).removeprefix("torch.")
        name = f"the weights of {self.model.name_or_path} in {dtype}"
        return {name: models.tensors_digest(p.flatten()[:64] for p in kept)}

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        rows, config = self._rows(rollout), self.model.config
        ids = [row["input_ids"] for row in rows]
        logits = logits_of(ids, config.num_labels, self.portion, lambda part: self._logits([rows[i] for i in part]))
        if self.model.dtype is torch.float16 and not bool(logits.isfinite().all()):
            wrong = (
                "the reward model gave a score that is not finite: it computes in float16, which overflows at 65,504."
            )
            raise NotFiniteError(wrong, remedy="If it does so again, set its dtype to float32.")
        return self.scores_of(logits, rollout, named_classes(config))

    def texts(self, rollout: Rollout) -> list[tuple[str, ...]]:
        """What is read of each response: one text, or two for a pair.

        Raises: RewardError: the prompts lack the column, or the model's chat template refuses a conversation.
        """
        rollout = replace(rollout, responses=[self._without_special(response) for response in rollout.responses])
        prompts = self.prompts_in(rollout.columns)
        if prompts is None:
            return [(response,) for response in rollout.responses]
        if self.reads == "conversation":
            return [(conversation(self.tokenizer, p, r),) for p, r in zip(prompts, rollout.responses, strict=True)]
        plain = [p if isinstance(p, str) else "\n\n".join(message["content"] for message in p) for p in prompts]
        if self.reads == "pair":
            return list(zip(plain, rollout.responses, strict=True))
        return [(prompt + response,) for prompt, response in zip(plain, rollout.continuations, strict=True)]

    def _without_special(self, response: str) -> str:
        """A response without what is spelt like a special token of this model's tokenizer, which would be read as one:
        the policy could write a turn of its own."""
        while (left := self._special.sub("", response)) != response:  # what stood around one may be one together
            response = left
        return response

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder  # of mistral-common's tokenizers a method, which has none
        added = added.values() if isinstance(added, Mapping) else ()
        names = {*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        # One of white space, or of a character or two, is plain text: an end of "\n", GPT-2's "!" for padding.
        told_apart = sorted((name for name in names if len(name.strip()) > 2), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, told_apart)) or "(?!)")

    def _rows(self, rollout: Rollout) -> list[dict[str, list[int]]]:
        """The model's inputs for each response, none longer than the limit."""
        limit = self.max_length or sys.maxsize
        texts = None if self.reads == "tokens" else self.texts(rollout)
        if texts is None:
            rows = [{"input_ids": ids} for ids in rollout.sequences(eos_token_id=int(self.tokenizer.eos_token_id))]
        else:
            rows = [self._encoded(text) for text in texts]
        cut = [i for i, row in enumerate(rows) if len(row["input_ids"]) > limit]
        for i in cut:
            last = {"input_ids": rows[i]["input_ids"][-limit:]}
            rows[i] = last if texts is None else self._cut(texts[i], len(rows[i]["input_ids"]), limit)
        if cut and not self.truncated:
            warnings.warn(
                f"{len(cut)} of {len(rows)} texts are longer than the {limit} tokens of the reward model and lose "
                "their beginning; later ones are counted (`truncated`).",
                stacklevel=3,
            )
        self.truncated += len(cut)
        return rows

    def _cut(self, texts: tuple[str, ...], length: int, limit: int) -> dict[str, list[int]]:
        """The model's inputs of a text that is too long by its tokens; of a pair the prompt alone is cut, if that has
        tokens enough for it."""
        prompt = len(self.tokenizer(texts[0], add_special_tokens=False, verbose=False)["input_ids"])
        only_prompt = len(texts) > 1 and prompt > length - limit
        return self._encoded(texts, truncation="only_first" if only_prompt else "longest_first", max_length=limit)

    def _encoded(self, texts: tuple[str, ...], **truncation: Any) -> dict[str, list[int]]:
        # A chat template writes the special tokens itself.
        encoded = self.tokenizer(*texts, add_special_tokens=self.reads != "conversation", verbose=False, **truncation)
        if not encoded["input_ids"]:  # an empty response alone: a model needs at least one token
            ends = (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id, 0)
            encoded = {name: [0] for name in encoded} | {"input_ids": [next(i for i in ends if i is not None)]}
        return {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}

    def _logits(self, rows: Sequence[dict[str, list[int]]]) -> Tensor:
        device, config = self.model.device, self.model.config.get_text_config()
        # Rounded up, a length must not pass the last position.
        multiple = models.LENGTH_MULTIPLE if (self.max_length or 0) % models.LENGTH_MULTIPLE == 0 else 1
        # Decoders pool at the last token that is another than the padding token.
        own, vocabulary = config.pad_token_id, self.model.get_input_embeddings().weight.shape[0]
        if own is None or not 0 <= own < vocabulary:
            used = {token for row in rows for token in row["input_ids"]}
            config.pad_token_id = next(token for token in range(vocabulary) if token not in used)
        inputs: dict[str, Tensor] = {}
        try:
            for name in rows[0]:
                fill = config.pad_token_id if name == "input_ids" else 0
                ids, mask = pad_rows([r[name] for r in rows], pad_token_id=fill, side="right", multiple=multiple)
                # The policy's base may have more rows than there are tokens, and draw an id that has no row here.
                inputs |= {name: ids.clamp(max=vocabulary - 1).to(device), "attention_mask": mask.to(device)}
            with torch.autocast(device.type, enabled=False):  # the trainer's would compute in its own precision
                return self.model(**inputs).logits
        finally:
            config.pad_token_id = own


@dataclass(kw_only=True)
class ModelScorer(TextScorer):
    """A sequence classifier on a base of its own, with its own tokenizer.

    Args:
        quantization: arguments of transformers' `BitsAndBytesConfig`.
    """

    kind: ClassVar[str] = "model"
    model: str | None = setting(
        None, "hub id or local folder; null is the model that the reward stage trains (section `reward_model`)."
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id; a folder has none.")
    trust_remote_code: bool = setting(False, "run code that comes with the checkpoint.")
    quantization: dict[str, Any] | None = None
    dtype: models.Dtype = setting(models.AUTO, "dtype of the weights that are not quantised; auto picks by hardware.")

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        of_a_checkpoint = ("revision", "trust_remote_code", "quantization", "dtype", "reads", "prompt_column")
        for name in of_a_checkpoint if self.model is None else ():
            if getattr(self, name) != getattr(ModelScorer, name):  # its default
                wrong = "would have no effect: no model is named, and the section reward_model describes the one that "
                yield Problem(f"{wrong}the reward stage trains.", name, "Remove it, or name a model.")

    def check(self, context: ScorerContext) -> list[Problem]:
        if self.model is None:  # how its classes are called is known once it is trained
            whose = "the model of section reward_model"
            return self.check_head(context, context.reward_outputs, None, whose=whose)
        problems: list[Problem] = []
        template, outputs, classes = None, None, None
        try:
            config, tokenizer, reads = self._fitted(context.tokenizer)
        except ToolkitError as error:
            problems += error.problems
        else:
            outputs, classes = config.num_labels, named_classes(config)
            template = tokenizer if reads == "conversation" else None
        if Path(self.model).is_dir():
            problems += [Problem(wrong, "model") for wrong in models.weight_file_problems(Path(self.model))]
            problems = problems or problems_of(self._loaded, models.META)
        problems += self.check_head(context, outputs, classes, whose=f'"{self.model}"')
        return problems + context.problems_of_prompts(partial(self.check_prompts, context, template))

    def build(self, context: ScorerContext) -> Reward:
        if self.model is not None:
            return self.load()
        assert context.reward_model is not None and context.tokenizer is not None
        made = RewardModel(context.reward_model, context.tokenizer, **{**self._text_settings, "reads": "tokens"})
        made.mean_score, made.high_score = (context.level.get(name) for name in ("mean_score", "high_score"))
        return made

    def load(self, device: torch.device | None = None) -> RewardModel:
        """The reward model, with its weights. For errors see `RewardModel.load`."""
        _, tokenizer, _ = self._fitted()
        return RewardModel(self._loaded(device), tokenizer, **self._text_settings)

    def _loaded(self, device: torch.device | None) -> PreTrainedModel:
        return models.load_model(self._spec, "sequence_classifier", trained=True, device=device)

    def outlines(self) -> Iterator[PreTrainedModel]:
        if self.model is not None:
            yield models.load_model(self._spec, "sequence_classifier", device=models.META)

    @property
    def _spec(self) -> models.ModelSpec:
        quantization = self.quantization
        if isinstance(quantization, dict):
            quantization = models.quantization_config(quantization, models.resolved(self.dtype))
        return models.ModelSpec(self.model, quantization=quantization, dtype=self.dtype, **self._code)

    @property
    def _text_settings(self) -> dict[str, Any]:
        return {setting.name: getattr(self, setting.name) for setting in fields(TextScorer)}

    @property
    def _code(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def _fitted(
        self, policys: PreTrainedTokenizerBase | None = None
    ) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase, Reads]:
        """The checkpoint's configuration and tokenizer, once they are known to fit these settings and the policy; and
        what it reads."""
        config = models.model_config(models.ModelSpec(self.model, **self._code), "sequence_classifier")
        kinds = config.architectures or []
        named = self.trust_remote_code or any("SequenceClassification" in kind for kind in kinds)
        # Heads of other classes may have such a name, too, and score tokens or choices.
        of_openrlhf = "RewardModel" in kinds and models.head_outputs(str(self.model)) is not None
        if kinds and not named and not of_openrlhf:
            remedy = "Name a checkpoint for sequence classification, as TRL's RewardTrainer saves it."
            if "RewardModel" in kinds:
                remedy += (
                    " One of OpenRLHF is read from a folder (hf download --local-dir), if its head is called score."
                )
            wrong = f'"{self.model}" is a {" and ".join(kinds)}, which has no head for scores.'
            raise RewardError(wrong, field="model", remedy=remedy)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model, **self._code)
        except Exception as error:  # of tokenizers and transformers, as the files have it
            wrong = f'no tokenizer could be loaded from "{self.model}" ({" ".join(str(error).split())})'
            raise RewardError(wrong, field="model", remedy="Save it beside the weights.") from error
        reads, _ = self.fitted(config, tokenizer, whose=f'"{self.model}"')
        if self.reads == "tokens" and policys is not None:
            models.check_same_tokenizer(str(self.model), policys, **self._code)
        return config, tokenizer, reads
