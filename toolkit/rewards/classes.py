"""From the outputs of a head with several classes to one score a response."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from toolkit.data import Rollout
from toolkit.errors import RewardError

ClassScore = Literal["logprob", "logit"]


def check_outputs(outputs: int, class_column: str | None, *, whose: str) -> None:
    """A head of one output needs no column, one of several the column that names the wanted class.

    Raises:
        RewardError: they do not fit.
    """
    if (outputs == 1) != (class_column is None):
        raise RewardError(
            f"{whose} has {outputs} output(s) and scorer.class_column is {class_column!r}: "
            "a score needs one output and no column, classes need the column that names the wanted one."
        )


def scores_of(
    logits: Tensor,
    rollout: Rollout,
    *,
    class_column: str | None,
    class_score: ClassScore = "logprob",
    label_ids: Mapping[str, int] | None = None,
) -> Tensor:
    """One score a response: the only output, or that of the class which the response's row names.

    Args:
        logits: (B, C).
        rollout: B responses.
        class_column: the column with the wanted class of each row, a number or a name; None where C is 1.
        class_score: log p(class), which saturates at 0 once the class is certain, or the class's logit, which goes on
            paying for more of the same.
        label_ids: numbers of the classes by name.

    Returns:
        float (B,).

    Raises:
        RewardError: the prompts have no such column, or a row names no class of the head.
    """
    if class_column is None:
        return logits.squeeze(-1)
    if class_column not in rollout.columns:
        present = ", ".join(rollout.columns) or "none"
        raise RewardError(f'scorer.class_column: the prompts have no column "{class_column}"; present: {present}.')
    named = dict(label_ids or {})
    wanted = [_class(value, named, logits.shape[1], class_column) for value in rollout.columns[class_column]]
    outputs = logits.log_softmax(dim=-1) if class_score == "logprob" else logits
    return outputs.gather(1, torch.tensor(wanted).unsqueeze(1)).squeeze(1)


def _class(value: Any, label_ids: dict[str, int], classes: int, column: str) -> int:
    if isinstance(value, str) and value in label_ids:
        return label_ids[value]
    try:
        number = int(value)
        known = number == float(value) and 0 <= number < classes
    except (TypeError, ValueError):
        known = False
    if not known:
        names = f" or {', '.join(label_ids)}" if label_ids else ""
        raise RewardError(
            f'scorer.class_column: column "{column}" names the class {value!r}, and the head has 0 to {classes - 1}'
            f"{names}. Mend that row."
        )
    return number
