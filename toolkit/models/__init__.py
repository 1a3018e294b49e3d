"""One base model and the roles on it; knows transformers, peft and bitsandbytes.

`load` has every model from a `ModelSpec`, in the precision that `precision` finds fast where none is named, and
`pretrained` what is read of a checkpoint before, `text_models` that of one with more parts than text, `bits` what is
quantised; `base_checks` tries on a few tokens (`trials`) what all else relies on, `logit_changes` what comes after
`lm_head`. `roles` holds the adapters and switches them (nothing else does), `forward` reads values, scores and
log-probabilities of `sequences`, whose rows `attention` keeps apart (`causal_attention` those in bfloat16 on a CPU),
`q_values` reads a role's logits as Q-values. `value_model` is a value role with a base of its own and `classifier` a
reward with one. `adapters` saves and loads PEFT folders, `views` shows roles to trainers that are not ours, `lora` has
all that is used of PEFT beyond its public interface, `fused_lora` computes its layers, and `decoding` is the loop over
new tokens, whose passes `graphs` records on a card; `caches` has what transformers calls the cache.
"""

from toolkit.models.adapters import (
    ROLE_FILE,
    adapter_config,
    base_named,
    level_of,
    load_role,
    load_weights,
    name_base,
    save_level,
    save_role,
)
from toolkit.models.attention import planned_for_cpu
from toolkit.models.base_checks import check_checkpointing
from toolkit.models.bits import about_other_bits, check_bits, keep_layout, own_quantization, quantize_outline
from toolkit.models.caches import CACHE
from toolkit.models.classifier import (
    add_lora,
    check_reads_tokens,
    classifier_token_scores,
    head_in_float32,
    head_name,
    load_classifier_weights,
    positions_passed_over,
    save_model,
    table_of_positions,
    train_in_float32,
)
from toolkit.models.decoding import RowProcessor, all_positions_of, positions_of
from toolkit.models.folders import read_tensors
from toolkit.models.forward import (
    PolicyReading,
    read_policy,
    response_logprobs,
    response_values,
    sequence_logits,
    value_after_response,
)
from toolkit.models.freed_memory import FreedMemory, keep_freed_memory
from toolkit.models.graphs import RecordedPass, check_records
from toolkit.models.heads import HeadInit, QBound, ScoreHead, score_positions
from toolkit.models.load import META, MOST_LAYERS, ModelSpec, load_base, load_model, model_config
from toolkit.models.logit_changes import scales_logits
from toolkit.models.lora import adapter_dropouts
from toolkit.models.precision import (
    AUTO,
    Dtype,
    Precision,
    default_device,
    fast_precision,
    finds_no_gpu,
    in_tf32,
    on_another_machine,
    quantization_config,
    resolved,
    slow_here,
)
from toolkit.models.pretrained import (
    check_same_tokenizer,
    embeddings_needed,
    head_outputs,
    load_tokenizer,
    save_tokenizer,
    weight_file_problems,
)
from toolkit.models.q_values import (
    LargestQ,
    WeightedByQ,
    add_q_roles,
    response_log_ratios,
    response_q,
    response_state_values,
    update_q_target,
)
from toolkit.models.roles import InRole, SharedBase, has_head, scores_for
from toolkit.models.sequences import LENGTH_MULTIPLE, Sequences
from toolkit.models.trials import raise_of_the_card, tried
from toolkit.models.value_model import ValueModel, load_value_model
from toolkit.models.views import PolicyView, SequenceClassifierView, TokenScoreView
from toolkit.models.weights import Merged, base_digest, frozen_digest, merge_adapter, tensors_digest
