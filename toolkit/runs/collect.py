"""The collect stage: responses sampled where the policy starts, scored, and written for the q stage and other tools.

Each line of the file is a JSON object: `prompt_ids`, `response_ids`, `prompt` and `response` as text, `rewards` (one
entry a token of the response, null where no reward is given: here the score, at the last token), and `ended`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, set_seed

from toolkit import phases, processes
from toolkit.checkpoints import (
    CHECKPOINT,
    checkpoint_folders,
    newest_whole,
    read_state,
    rotate,
    step_of,
    stop_requests,
    whole_folder,
    write_state,
)
from toolkit.data import Rollout
from toolkit.disk import delete_written, sync, writing
from toolkit.errors import CheckpointError, RunInterrupted
from toolkit.functional import standard_error
from toolkit.reports import Progress, append_jsonl, count_lines, iter_jsonl, keep_lines, read_json, write_json
from toolkit.rewards import DenseScores, Scores, score_with, state_of
from toolkit.runs import build
from toolkit.runs.memory import weights_fit
from toolkit.sampling import Sampler
from toolkit.spec.recipe import Recipe
from toolkit.trainers.same_run import check_alike, check_frozen, check_same_run, frozen_digests, identity

BEGUN_FILE = "begun_with.json"  # beside the partial file


def partial_file(folder: Path) -> Path:
    """What stands in a stage's folder while responses are collected."""
    return folder / f"{build.RESPONSES_FILE}.partial"


def collect(recipe: Recipe, path: Path) -> dict[str, float]:
    """Sample and score responses to the recipe's training prompts.

    Batch after batch is added to a partial file beside `path`, which takes its name at the end. Where there is one,
    what it lacks is added. Each batch has a seed of its own, and the state of a reward that changes as it goes is saved
    after each, so that the file is the same however often it was stopped.

    Args:
        recipe: with a section `collect`.
        path: JSON Lines file to write; its folder is there.

    Returns:
        `responses`, mean `score` with `score_se`, `length` and `eos_share`.

    Raises:
        RunInterrupted: a signal asked to stop; what was collected is saved.
        DataError: a prompt is too long for the base, or has a token that it does not know.
        RewardError: the reward raised, or did not return one finite number each.
        CheckpointError: a partial file has responses to other prompts, of another base or adapter, or the state of the
            reward that goes with it is gone.
        SelfCheckError: several processes do not begin with the same base, data or versions.
        ToolkitError: the file cannot be written.
    """
    settings = recipe.collect
    with processes.agreed():
        prompts = build.stage_dataset(recipe, "collect", "prompts", "train")
    number = min(len(prompts), settings.max_prompts or len(prompts)) * settings.samples_per_prompt
    starts = range(0, number, settings.batch_size)
    unfinished = partial_file(path.parent)
    done = processes.by_main(lambda: _whole_batches(path, unfinished, settings.batch_size, number))
    processes.by_main(lambda: _check_prompts(unfinished, prompts, settings.samples_per_prompt))
    progress = Progress(f"{recipe.run} collect", quiet=not processes.is_main())
    with progress, stop_requests(lambda: "the batch in hand is finished and saved, then it stops.") as request:
        changing = None
        if done < len(starts):
            with phases.phase("load"), processes.agreed(), weights_fit(recipe):
                roles, pad_tokens = build.placed_roles(recipe, "collect")
                sampler = Sampler(
                    roles,
                    recipe.tokenizer,
                    role="reference",
                    response_length=settings.response_length,
                    temperature=settings.temperature,
                )
                # Found in a later batch, it would end the collection, which could not go on with shorter prompts.
                sampler.limits(prompts["input_ids"][: number // settings.samples_per_prompt])
                reward = build.make_reward(recipe, roles, pad_tokens, settings.batch_size)
            now = {**identity(prompts, roles.causal_lm, roles, reward), "frozen": frozen_digests(roles)}
            check_alike(now)
            processes.by_main(partial(_begun_with, now, unfinished, anew=not done))
            if (changing := state_of(reward)) is not None:
                done = min(done, _to_its_state(changing, unfinished, settings.batch_size, done))
        progress.steps(done, len(starts), "batch")
        for batch in range(done, len(starts)):
            rows = range(starts[batch], min(starts[batch] + settings.batch_size, number))
            set_seed((recipe.seed * 1_000_003 + batch) % 2**32)  # what numpy takes
            with phases.phase("rollout"):
                rollout = sampler(sampler.collator([prompts[row // settings.samples_per_prompt] for row in rows]))
            with phases.phase("score"):
                scored = _rows(rollout, score_with(reward, rollout), recipe.tokenizer)
            processes.by_main(partial(append_jsonl, unfinished, scored))
            if changing is not None:
                processes.by_main(partial(_save_state, changing.state_dict(), unfinished, batch + 1))
            progress.step_ended(batch + 1)
            if (asked := processes.first(request.received)) is not None:
                after = f"collect stopped by {asked.name} after {rows.stop:,} of {number:,} responses"
                raise RunInterrupted(f"{after}; they are saved in {unfinished}.", asked)
    processes.by_main(lambda: _finish(unfinished, path))
    return processes.by_main(lambda: _figures(path, settings.samples_per_prompt))


def _whole_batches(path: Path, partial: Path, size: int, number: int) -> int:
    """Batches of `number` responses that a partial file holds; what a kill left of another is cut off. One that has
    its name already, where the kill came before the result, is partial again."""
    with writing(path):
        if path.is_file() and not partial.exists():
            path.rename(partial)
        partial.touch()
    lines = count_lines(partial)
    kept = lines if lines == number else lines // size * size  # the last batch may be smaller
    return math.ceil(keep_lines(partial, kept) / size)


def _begun_with(now: dict[str, Any], partial: Path, *, anew: bool) -> None:
    """Note what a collection begins with, or hold it against that: what is scored and sampled is to be of one."""
    file = partial.with_name(BEGUN_FILE)
    then = None if anew else read_json(file)
    if then is None:
        write_json(file, {**now, "processes": processes.count()})
        return
    check_same_run(partial, then, now)
    check_frozen(then["frozen"], now["frozen"])


def _save_state(state: dict[str, Any], partial: Path, batches: int) -> None:
    folder = partial.parent
    with writing(partial):
        sync(partial)  # a state of batches that a power cut took would score those after them otherwise
    with whole_folder(folder / f"{CHECKPOINT}{batches}") as new:
        write_state(new, state)
    rotate(folder, 1, keep=())


def _to_its_state(reward: Any, partial: Path, size: int, done: int) -> int:
    """Give a reward the state that it had last; the batches until then, to which the partial file is cut."""
    saved = processes.by_main(lambda: newest_whole(partial.parent, say=phases.tell))
    batches = 0 if saved is None else step_of(saved)
    # A kill between the responses of a batch and the state after it leaves one batch more.
    if not batches <= done <= batches + 1:
        wrong = f"{partial} holds {done} batches, and the state that the reward had after them is not there."
        raise CheckpointError(wrong, remedy="Restore the checkpoint folder beside it, or begin anew with $overwrite.")
    if saved is not None:
        reward.load_state_dict(read_state(saved))
    processes.by_main(lambda: keep_lines(partial, batches * size))
    return batches


def _finish(partial: Path, path: Path) -> None:
    with writing(path):
        sync(partial)
        partial.replace(path)
        partial.with_name(BEGUN_FILE).unlink(missing_ok=True)
        for folder in checkpoint_folders(path.parent):
            delete_written(folder)


def _check_prompts(partial: Path, prompts: Dataset, samples_per_prompt: int) -> None:
    """Nothing, if the responses of a partial file are to these prompts, else a CheckpointError."""
    asked = prompts["input_ids"]
    for line, row in enumerate(iter_jsonl(partial)):
        place = line // samples_per_prompt
        if place >= len(asked) or row.get("prompt_ids") != list(asked[place]):
            wrong = f"{partial}, line {line + 1}: is a response to another prompt than that of the data now."
            raise CheckpointError(wrong, remedy="Restore the data, or begin anew with $overwrite.")


def _rows(rollout: Rollout, scores: Scores, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    for i, rewards in enumerate(_rewards(rollout, scores, tokenizer)):
        yield {
            "prompt_ids": list(rollout.prompt_ids[i]),
            "response_ids": list(rollout.response_ids[i]),
            "prompt": rollout.prompts[i],
            "response": rollout.responses[i],
            "rewards": rewards,
            "ended": rollout.ended[i],
        }


def _rewards(rollout: Rollout, scores: Scores, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[float | None]]:
    """An entry a token, None where no reward was given; a score of the whole response stands at its last."""
    if not isinstance(scores, DenseScores):
        for length, score in zip(rollout.lengths, scores.tolist(), strict=True):
            yield [None] * (length - 1) + [score]
        return
    at_tokens, at_end = scores.at_tokens(rollout, tokenizer).tolist(), torch.as_tensor(scores.scores).tolist()
    tokens = scores.tokens or [[]] * len(rollout)
    graded = replace(scores, tokens=[torch.zeros(0)] * len(rollout), spans=_marks(scores.spans))
    marks = graded.at_tokens(rollout, tokenizer).tolist()
    for i, length in enumerate(rollout.lengths):
        every = len(tokens[i]) > 0
        pairs = zip(at_tokens[i][:length], marks[i], strict=False)
        row = [reward if every or marked else None for reward, marked in pairs]
        yield [*row[:-1], (row[-1] or 0.0) + at_end[i] if scores.at_end else row[-1]]


def _marks(spans: Any) -> list[list[tuple[int, int, float]]]:
    """The same spans with 1 each: what is 0, or comes to it, is a reward as well."""
    return [[(start, end, 1.0) for start, end, _ in row] for row in spans]


def _figures(path: Path, samples_per_prompt: int) -> dict[str, float]:
    """Of all responses; the standard error is that of the prompts' means, since responses to one prompt are alike."""
    found, length, ended = [], 0, 0
    for row in iter_jsonl(path):  # one at a time: there may be a million
        found.append(sum(reward or 0.0 for reward in row["rewards"]))
        length, ended = length + len(row["response_ids"]), ended + row["ended"]
    scores = torch.tensor(found)
    return {
        "responses": len(found),
        "score": float(scores.mean()),
        "score_se": standard_error(scores.view(-1, samples_per_prompt).mean(dim=1)),
        "length": length / len(found),
        "eos_share": ended / len(found),
    }
