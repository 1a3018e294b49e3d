"""Prompts to responses, and what they are worth: shared by the trainers, collect, chat, generate and eval.

`Sampler` is the only thing that generates, `Evaluator` measures what it says, `signs` are of a reward that is fooled,
`best_of` keeps the best of several.
"""

from toolkit.sampling.evaluation import BestOf, Evaluation, Evaluator, Metrics, best_of, measured_with
from toolkit.sampling.sampler import Rows, Sampler, all_at_once, batches, check_room, key_of, prompts_in
from toolkit.sampling.signs import SIGNS, distinct_share, since_first
