"""Work and figures that can be checked by hand."""

from benchmarks.work import Size, Work

SIZE = Size(rollouts=4, response_length=10, micro_batch=2)
BY_HAND = Work(
    size=Size(rollouts=2, response_length=4, micro_batch=1, epochs=2),
    prompt_ids=[[5, 6, 7], [8, 9, 5, 6, 8]],
    sampled=[[10, 11, 12, 13], [14, 15, 16, 17]],
    lengths=[4, 2],
    eos_token_id=2,
)


FIGURES = {"score": 0.0, "kl": 0.0, "entropy": 9.0, "policy_loss": 0.0, "value_loss": 1.0, "policy_gradient": 1.0,
           "value_head_gradient": 1.0}  # fmt: skip
"""Of a contender on one micro-batch."""


def one_round(slow=1.0, *, agilerl=False):
    """Round figures; `slow` stretches what is not ours, `agilerl` adds the contenders without a reward role."""
    totals = {
        "ours-separate": 20, "ours-shared": 12, "ours-separate-nf4": 30, "ours-shared-nf4": 15,
        "stock-full": 20 * slow, "stock-peft": 25 * slow, "stock-peft-nf4": 35 * slow, "stock-views": 10 * slow,
    }  # fmt: skip
    memory = {"ours-separate": 2.2, "ours-shared": 2.4, "ours-separate-nf4": 2.0, "ours-shared-nf4": 2.5,
              "stock-full": 4.0, "stock-peft": 5.0, "stock-peft-nf4": 4.5, "stock-views": 3.0}  # fmt: skip
    if agilerl:
        totals |= {"ours-separate-unscored": 16, "ours-shared-unscored": 10, "ours-separate-unscored-nf4": 20,
                   "ours-shared-unscored-nf4": 12, "agilerl": 40, "agilerl-nf4": 80}  # fmt: skip
        memory |= {**dict.fromkeys(totals.keys() - memory.keys(), 2.0), "agilerl": 4.0}
    return {
        "contenders": {
            name: {
                "updates": [{"rollout": seconds / 4, "score": seconds / 4, "update": seconds / 2}],
                "memory_gb": {"resident": memory[name]},
            }
            for name, seconds in totals.items()
        },
        "floor": {
            value: {"seconds": {"rollout": 1.0, "score": 1.0, "update": least}}
            for value, least in (("separate", 3.0), ("shared", 1.0))
        },
    }


def scored_arm(arm, job):
    shift = {"trl-bf16": 0.0, "ours-nf4": 0.1, "ours-nf4-token-level": -0.1}[arm]
    margins = [shift + 1, shift - 1, shift + job.seed]
    return {"arm": arm, "seed": job.seed, "margins": margins, "seconds": 1.0, "memory_gb": {"resident": 1.5}}
