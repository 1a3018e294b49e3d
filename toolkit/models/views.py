"""Roles as modules of the form that TRL's and transformers' own trainers expect.

A view switches to its role in `forward`. It owns nothing but its head. Of those that TRL's PPO holds side by side
`PolicyView` alone registers the shared base, so that an optimizer over several of them sees each parameter once.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from toolkit.models.forward import reward_states, sequence_logits
from toolkit.models.roles import SharedBase


class PolicyView(nn.Module):
    """The role "policy" or "reference" as a causal language model, for the unmodified `trl` PPOTrainer."""

    def __init__(self, base: SharedBase, role: str):
        super().__init__()
        self.base, self.role = base, role
        self.config = base.config
        self.generation_config = base.causal_lm.generation_config
        # TRL toggles checkpointing around generation on whatever says it uses it; with joint backward passes
        # over two roles that path is not offered.
        self.is_gradient_checkpointing = False

    def forward(self, **kwargs: Any) -> Any:
        kwargs.pop("output_hidden_states", None)  # TRL asks for every layer's and reads none
        with self.base.role(self.role):
            return self.base(use_cache=False, **kwargs)

    def generate(self, **kwargs: Any) -> Any:
        with self.base.role(self.role), self.base.in_eval_mode():
            return self.base.causal_lm.generate(**kwargs)


class TokenScoreView(nn.Module):
    """The role "value" or "reward" as TRL's `get_reward` reads one: a backbone by name and a `score` head."""

    base_model_prefix = "backbone"

    def __init__(self, base: SharedBase, role: str):
        super().__init__()
        self._base, self._role = (base,), role
        self.score = base.head(role)
        self.config = base.config

    def backbone(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **_: Any) -> BaseModelOutput:
        base = self._base[0]
        with base.role(self._role):
            hidden = base.hidden_states(input_ids, attention_mask, position_ids=position_ids)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))


class SequenceClassifierView(nn.Module):
    """The role "reward" as a sequence classifier, for `trl.RewardTrainer` and transformers' `Trainer`."""

    def __init__(self, base: SharedBase, *, pad_token_id: int):
        super().__init__()
        self.base, self.pad_token_id = base, pad_token_id
        # TRL writes pad_token_id and reads num_labels here; the shared configuration stays as it is.
        self.config = type(base.config).from_dict(base.config.to_dict())
        self.config.num_labels = base.head("reward").out_features
        self.get_input_embeddings = base.causal_lm.get_input_embeddings  # for neftune_noise_alpha
        self.gradient_checkpointing_enable = base.gradient_checkpointing_enable
        self.activation_checkpointing_enable = base.activation_checkpointing_enable

    def add_model_tags(self, tags: list[str]) -> None:
        """Tags are for model cards of whole models; an adapter's card is written by `save_role`'s caller."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        margin: Tensor | None = None,
        every_token: bool = False,
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and the cross-entropy with `labels` (B,) if they are given.

        With `every_token` the logits are (B, L, num_labels). TRL hands over all columns of a batch, and those that
        belong to its loss (`use_cache`, `margin`) are not read here.
        """
        if every_token:
            hidden = reward_states(self.base, input_ids, attention_mask)
            return SequenceClassifierOutput(logits=self.base.head("reward")(hidden))
        logits = sequence_logits(self.base, input_ids, attention_mask, pad_token_id=self.pad_token_id)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
