"""One base model and the roles on it; knows transformers, peft and bitsandbytes.

`base` loads the base, `roles` holds the adapters and switches them (nothing else does), `heads` and
`forward` read values, scores and log-probabilities, `value_model` is a value role with a base of its
own, `q_values` and `q_decoding` read a role's logits as Q-values, `adapters` saves and loads PEFT folders, `merge`
puts one into the base's weights, `views` shows roles to trainers that are not ours.
"""

from toolkit.models.adapters import base_digest, load_role, load_weights, role_digest, save_role
from toolkit.models.base import build_base, load_base, load_tokenizer, neutral_generation_config
from toolkit.models.classifier import (
    add_lora,
    check_reads_tokens,
    check_same_tokenizer,
    classifier_config,
    classifier_outline,
    classifier_token_scores,
    head_in_float32,
    load_classifier,
    load_classifier_weights,
    save_classifier,
    train_in_float32,
)
from toolkit.models.forward import (
    PolicyReading,
    ResponseKL,
    read_policy,
    response_full_kl,
    response_logprobs,
    response_logprobs_and_values,
    response_values,
    sequence_logits,
    token_logits,
    value_after_response,
)
from toolkit.models.heads import ScoreHead, score_positions
from toolkit.models.memory import LENGTH_MULTIPLE, release_memory
from toolkit.models.merge import Merged, merge_adapter
from toolkit.models.q_decoding import generate_by_q
from toolkit.models.q_head import QBound
from toolkit.models.q_values import (
    ResponseQ,
    StateValues,
    add_q_roles,
    q_of_states,
    response_log_ratios,
    response_q,
    response_state_values,
    update_q_target,
)
from toolkit.models.roles import HEAD_ROLES, Q_ROLES, ROLES, SharedBase, missing_modules
from toolkit.models.sequences import Sequences
from toolkit.models.value_model import ValueModel, load_value_model
from toolkit.models.views import PolicyView, SequenceClassifierView, TokenScoreView

__all__ = [
    "HEAD_ROLES",
    "LENGTH_MULTIPLE",
    "Q_ROLES",
    "ROLES",
    "Merged",
    "PolicyReading",
    "PolicyView",
    "QBound",
    "ResponseKL",
    "ResponseQ",
    "ScoreHead",
    "SequenceClassifierView",
    "Sequences",
    "SharedBase",
    "StateValues",
    "TokenScoreView",
    "ValueModel",
    "add_lora",
    "add_q_roles",
    "base_digest",
    "build_base",
    "check_reads_tokens",
    "check_same_tokenizer",
    "classifier_config",
    "classifier_outline",
    "classifier_token_scores",
    "generate_by_q",
    "head_in_float32",
    "load_base",
    "load_classifier",
    "load_classifier_weights",
    "load_role",
    "load_tokenizer",
    "load_value_model",
    "load_weights",
    "merge_adapter",
    "missing_modules",
    "neutral_generation_config",
    "q_of_states",
    "read_policy",
    "release_memory",
    "response_full_kl",
    "response_log_ratios",
    "response_logprobs",
    "response_logprobs_and_values",
    "response_q",
    "response_state_values",
    "response_values",
    "role_digest",
    "save_classifier",
    "save_role",
    "score_positions",
    "sequence_logits",
    "token_logits",
    "train_in_float32",
    "update_q_target",
    "value_after_response",
]
