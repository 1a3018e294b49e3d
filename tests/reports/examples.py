"""A result as a stage writes it, and held-out pairs with their scores."""

RESULT = {
    "run": "my-run", "recipe": "r", "stage": "ppo", "seed": 0, "seconds": 1.5, "peak_memory_gb": {"resident": 1.0},
    "versions": {"trl": "1"},
    "before": {"score": 1.0, "accuracy_ci": [0.1, 0.2]}, "after": {"score": 2.0, "accuracy_ci": [0.3, 0.4]},
}  # fmt: skip


def pair(chosen_score, rejected_score, chosen_length, rejected_length, text="x"):
    return {
        "prompt": f"prompt {text}", "chosen": f"chosen {text}", "rejected": f"rejected {text}",
        "chosen_score": chosen_score, "rejected_score": rejected_score, "chosen_length": chosen_length,
        "rejected_length": rejected_length,
    }  # fmt: skip


PAIRS = [pair(2.0, 0.0, 10, 5, "a"), pair(1.0, 1.5, 4, 8, "<b>"), pair(0.0, 3.0, 3, 9, "c"), pair(1.0, 1.0, 6, 6, "d")]
