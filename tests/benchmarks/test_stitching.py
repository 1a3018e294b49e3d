"""The best answer is in parts of several responses: Q-learning puts it together, cloning does not."""

from benchmarks.stitching import EOS, Task, run


def test_the_best_answer_is_in_no_response_and_its_parts_are():
    task = Task(0)
    whole = {(*row["prompt_ids"], *row["response_ids"]): row["response_ids"] for row in task.rows}
    for prompt, worth in zip(task.prompts, task.worth, strict=True):
        best = max(worth, key=lambda answer: worth[answer])
        assert worth[best] == 1.0 and len(best) == 3
        from_the_start = [row["response_ids"] for row in task.rows if row["prompt_ids"] == prompt]
        assert [*best, EOS] not in from_the_start
        assert whole[(*prompt, *best, EOS)] == [best[2], EOS]  # only as the end of somebody else's
        assert max(row["rewards"][-1] for row in task.rows if row["prompt_ids"] == prompt) == 0.5
    assert task.measure([[*max(w, key=lambda a, w=w: w[a]), EOS] for w in task.worth]) == {"worth": 1, "best_share": 1}
    assert task.measure([[5, 5, 5]] * 8) == {"worth": 0.0, "best_share": 0.0}
    assert all(row["rewards"][-1] in (0.5, 0.3, 1.0) for row in task.filtered())


def test_q_learning_finds_it_and_cloning_does_not():
    found = run(0, steps=150, questions=1)
    assert found["q_learning"] == {"worth": 1.0, "best_share": 1.0}
    assert found["behaviour_cloning"]["best_share"] == found["filtered_cloning"]["best_share"] == 0.0
    assert found["filtered_cloning"]["worth"] == found["best_single_response"]["worth"] == 0.5
