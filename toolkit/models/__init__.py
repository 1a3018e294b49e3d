"""One base model and the roles on it; knows transformers, peft and bitsandbytes.

`base` loads the base, `roles` holds the adapters and switches them (nothing else does), `heads` and
`forward` read values, scores and log-probabilities, `adapters` saves and loads PEFT folders, `merge` puts
one into the base's weights, `views`
shows roles to trainers that are not ours. `q_values` and `q_decoding` read a role's logits as Q-values.
"""

from toolkit.models.adapters import load_role, load_weights, role_digest, save_role
from toolkit.models.base import build_base, load_base, load_tokenizer, neutral_generation_config, stop_token_ids
from toolkit.models.forward import (
    PolicyReading,
    ResponseKL,
    read_policy,
    response_full_kl,
    response_logprobs,
    response_logprobs_and_values,
    response_values,
    sequence_logits,
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
    "add_q_roles",
    "build_base",
    "generate_by_q",
    "load_base",
    "load_role",
    "load_tokenizer",
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
    "save_role",
    "score_positions",
    "sequence_logits",
    "stop_token_ids",
    "update_q_target",
    "value_after_response",
]
