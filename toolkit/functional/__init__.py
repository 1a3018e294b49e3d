"""The mathematics of PPO and Q-learning as pure functions of tensors; knows torch alone.

No function changes its arguments, moves a device or reads a configuration. Gradients flow through
everything: the caller detaches what is to be constant.

Vocabulary, here, in metric names and in the docs:

| name | meaning |
|---|---|
| `logprobs` | log-probability of each response token under the policy being trained |
| `old_logprobs` | the same under the policy that sampled the response |
| `ref_logprobs` | the same under the frozen reference |
| `values`, `old_values` | the value role's estimate at each response token, now and at the rollout |
| `scores` | one number for each response, from a reward |
| `rewards` | one number for each response token: the score at the last one, less the KL penalty |
| `advantages`, `returns` | generalised advantage estimates, and `advantages + old_values` before whitening |
| `log_ratio`, `ratio` | `logprobs - old_logprobs` and its exponential |
| `approx_kl` | estimate of KL(old policy, new policy) over an update |
| `clip_fraction` | share of response tokens where the clipped branch of a loss is the active one |
| `response_mask` | True at each response token that counts, its end-of-sequence token included |
| `q`, `state_values` | Q of each response token that was taken, and the largest Q of the state before it |
| `reward_mask` | True at each response token after which a reward was given, whatever its sign |

Dimensions: `B` batch, `T` response tokens, `P` prompt tokens, `L` prompt and response, `N` any number
of tokens, `V` vocabulary, `H` hidden size. A mask is named for what True keeps.
"""

from toolkit.functional.advantages import (
    ValuePooling,
    generalized_advantage_estimation,
    pool_values,
    shape_rewards,
)
from toolkit.functional.kl import KL_ESTIMATORS, adapt_kl_coef, full_kl, kl_abs, kl_k1, kl_k2, kl_k3
from toolkit.functional.logprobs import token_logprobs, token_logprobs_and_entropy
from toolkit.functional.losses import (
    ClippedLoss,
    clipped_policy_loss,
    clipped_value_loss,
    first_differences,
    token_level_preference_loss,
)
from toolkit.functional.q_learning import (
    best_q_values,
    bounded_q,
    conservative_loss,
    monte_carlo_returns,
    q_policy_logprobs,
    q_targets,
    td_loss,
    token_q_values,
)
from toolkit.functional.sampling import inverse_cdf
from toolkit.functional.statistics import (
    Moments,
    best_of_kl_bound,
    calibration_bins,
    expected_best,
    expected_calibration_error,
    masked_mean,
    masked_var,
    pearson_correlation,
    scale_to_unit_variance,
    spearman_correlation,
    standard_error,
    update_moments,
    whiten,
    wilson_interval,
)
