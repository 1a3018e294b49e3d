"""Responses of a trained run: to prompts, with the reference's beside them or the best of several; or as a chat."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from transformers import TextStreamer, set_seed

from toolkit import processes
from toolkit.data import read_rows
from toolkit.data.files import shown
from toolkit.data.messages import Messages
from toolkit.disk import write_output
from toolkit.errors import ColumnError, DataError, LengthError, NotFiniteError, RewardError, ToolkitError, printable
from toolkit.functional import best_of_kl_bound, expected_best
from toolkit.inference.saved_run import place_reference, policy_folder, trained_sampler, warn_of_another_base
from toolkit.models import scores_for
from toolkit.reports import Output, texts_table
from toolkit.rewards.scorer import at_row
from toolkit.runs import build
from toolkit.runs.owned import check_output
from toolkit.sampling import Sampler, batches, best_of
from toolkit.spec.recipe import Recipe

_BATCH_SIZE = 8  # of a process
_ROWS_OF_ALL = 16  # of a table


def respond(sampler: Sampler, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Responses to rows with `input_ids`, as text."""
    texts: list[str] = []
    for some in batches(rows, _BATCH_SIZE * processes.count()):
        texts += sampler(sampler.collator(some)).responses
    return texts


class Asked(NamedTuple):
    """A prompt: where it stands, as text, and as a row with all columns of all prompts; one that it lacks is None."""

    place: str
    text: str
    row: dict[str, Any]


def prompts_of(recipe: Recipe, texts: Sequence[str], file: Path | None, number: int) -> list[Asked]:
    """The prompts of the texts and the file, or else the first held-out ones."""
    if isinstance(texts, str):
        raise DataError("texts is one text, and a list of them is needed.", field="texts", remedy="Put it into a list.")
    if not texts and file is None:
        held_out = recipe.task.prompts("test")
        rows = [held_out[i] for i in range(min(number, len(held_out)))]
        texts = recipe.tokenizer.batch_decode([row["input_ids"] for row in rows])
        numbered = enumerate(zip(texts, rows, strict=True), 1)
        return [Asked(f"held-out prompt {number}", text, row) for number, (text, row) in numbered]
    asked = [Asked(f'the prompt "{shown(text)}"', text, recipe.task.typed(text)) for text in texts]
    if file is not None:
        of_file = read_rows(str(file), field="file")
        asked += [Asked(place, *recipe.task.prompt_of(place, row)) for place, row in of_file]
    if not asked:
        raise DataError(f"{file}: no prompts.", field="file", remedy="Give a file that has some.")
    names = dict.fromkeys(chain.from_iterable(one.row for one in asked))  # a reward may read them, as in training
    return [one._replace(row={name: one.row.get(name) for name in names}) for one in asked]


def _rows(sampler: Sampler, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Their rows; before the first of them is answered each is known to have room for a response.

    Raises:
        DataError: one has not.
    """
    for one in asked:
        with at_row(one.place):
            sampler.limits([one.row["input_ids"]])
    return [one.row for one in asked]


def _check_output(recipe: Recipe, output: Path | None, file: Path | None) -> None:
    """Raises ToolkitError: it cannot be written, or is the file that is read, or one of the run."""
    check_output(output, [recipe.folder])
    if output is not None and file is not None and output.exists() and file.exists() and output.samefile(file):
        wrong = f"{output} is the file of the prompts, which would be overwritten."
        raise ToolkitError(wrong, field="output", remedy="Name another one.")


def _write(output: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_output(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


class _Streamer(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


def generate(
    recipe: Recipe,
    *,
    texts: Sequence[str] = (),
    file: Path | None = None,
    number: int = 5,
    compare: bool = False,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    output: Path | None = None,
) -> list[dict[str, str]]:
    """Respond to prompts as a trained run does, show it, and write it to `output` as JSON Lines.

    Prompts are the texts and those of a file in any format of the data section, or else the first `number` held-out
    ones. A `temperature` of 0 decodes greedily, and so does a policy where it is None, and Q as the recipe says;
    `max_new_tokens` is the recipe's `response_length` if None.

    Returns:
        A row a prompt: `prompt`, `policy`, and `reference` where that is to `compare`.
    """
    processes.by_main(lambda: _check_output(recipe, output, file))
    with processes.agreed():
        asked = prompts_of(recipe, texts, file, number)  # before the weights, which may take minutes
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "compare": compare}
        sampler = trained_sampler(recipe, of_policy=0.0, **settings)
        set_seed(seed)
        prompts = _rows(sampler, asked)
    columns = {"prompt": [one.text for one in asked], "policy": respond(sampler, prompts)}
    if compare:
        columns["reference"] = respond(sampler.reference, prompts)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if output is not None:  # before they are shown: a pager that is quit closes standard output
        processes.by_main(partial(_write, output, rows))
    Output().print(texts_table(rows, list(columns)))
    return rows


def generate_best(
    recipe: Recipe,
    *,
    num_samples: int,
    texts: Sequence[str] = (),
    file: Path | None = None,
    number: int = 5,
    seed: int = 0,
    output: Path | None = None,
) -> list[dict[str, Any]]:
    """Sample several responses to each prompt, score all by the run's reward, and show the best.

    Below them stands how the mean score grows with the number of samples, beside the KL that it costs at most. Samples
    at the temperature of the recipe's ppo stage and without its `max_length`; other arguments as for `generate`.

    Returns:
        A row a prompt: `prompt`, `policy` (the best response), `score`, and `candidates`: all, with their scores.

    Raises:
        RewardError: the reward needs a column that given prompts do not have.
    """
    processes.by_main(lambda: _check_output(recipe, output, file))
    with processes.agreed():
        asked = prompts_of(recipe, texts, file, number)
        planned = recipe.plan.stages["ppo"].roles
        wanted = {"policy", *(one.role for one in planned if scores_for(one.role) == "reward")}
        roles, pad_tokens = build.placed_roles(recipe, "ppo", trained=policy_folder(recipe), wanted=wanted)
        warn_of_another_base(recipe, roles.causal_lm)
        rollouts = build.make_rollouts(recipe, roles)
        splits = () if texts or file is not None else build.HELD_OUT
        portion = rollouts.args.local_rollout_forward_batch_size
        reward = build.make_reward(recipe, roles, pad_tokens, portion, splits=splits)
        set_seed(seed)
        sampler = replace(rollouts.sampler(), max_length=None)  # which is of training: see `generate`
        prompts = _rows(sampler, asked)
    size = rollouts.args.per_device_eval_batch_size
    try:
        sampled = best_of(prompts, num_samples, sampler=sampler, reward=reward, batch_size=size)
    except RewardError as error:
        if not isinstance(error, NotFiniteError):  # which the policy's logits may be, too
            error.within("scorer")
        if isinstance(error, ColumnError) and (texts or file is not None):
            error.add_remedy("Prompts need what the reward reads: name a .jsonl file with it, or no prompts.")
        raise
    rows, scored_rows, means = [], [], sampled.scores.mean(dim=1).tolist()
    for i, (prompt, best) in enumerate(zip(asked, sampled.best.responses, strict=True)):
        responses = sampled.candidates.responses[i * num_samples : (i + 1) * num_samples]
        scores = sampled.scores[i].tolist()
        scored = [{"response": text, "score": score} for text, score in zip(responses, scores, strict=True)]
        rows.append({"prompt": prompt.text, "policy": best, "score": max(scores), "candidates": scored})
        scored_rows.append({**rows[-1], "score: best, mean": f"{max(scores):.3f}, {means[i]:.3f}"})
    if output is not None:
        processes.by_main(partial(_write, output, rows))
    title = f"the best of {num_samples}"
    Output().print(texts_table(scored_rows, ("prompt", "policy"), title=title, figures="score: best, mean"))
    growth = Table(title=f"mean score of the best of N, over {len(rows)} prompts")
    for name in ("N", "score", "KL at most"):
        growth.add_column(name, justify="right")
    for n, score in enumerate(expected_best(sampled.scores).tolist(), 1):
        if n <= _ROWS_OF_ALL or n == num_samples or n & (n - 1) == 0:  # then the powers of two
            growth.add_row(str(n), f"{score:.4f}", f"{best_of_kl_bound(n):.4f}")
    Output().print(growth)
    return rows


def converse(
    recipe: Recipe,
    sampler: Sampler,
    *,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = print,
    compare: bool = False,
) -> None:
    """A conversation with a `trained_sampler` on the terminal, until `read` raises EOFError.

    Lines that begin with a slash are commands, which it names. The policy's responses go on as the conversation, their
    tokens streamed to standard output; `write` shows what is around them. The sampler need not have its reference until
    that is compared.
    """
    write("/reset forgets, /compare shows the reference or hides it, /quit ends (so does Ctrl-D).")
    if not recipe.task.converses:
        write("This recipe's prompts are plain text: each line is a prompt of its own.")
    messages: Messages = []
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            wrong = f"standard input is no text in {error.encoding}."
            raise DataError(wrong, remedy="Send it in that encoding.") from error
        if line == "/quit":
            return
        if line == "/reset":
            messages = []
        elif line == "/compare":
            compare = not compare and _can_compare(recipe, sampler, write)
            write(f"the reference is {'shown' if compare else 'hidden'}")
        elif line.startswith("/"):
            write(f"no command {line}; there are /reset, /compare and /quit")
        elif line:
            samplers = {"policy": sampler} | ({"reference": sampler.reference} if compare else {})
            try:
                messages = _exchange(recipe, samplers, messages if recipe.task.converses else [], line, write)
            except DataError as error:  # of a line that cannot be a prompt, or a conversation that is too long
                remembered = messages and recipe.task.converses and isinstance(error, LengthError)
                write(f"{error}{' /reset makes room.' if remembered else ''}")
            except torch.OutOfMemoryError:
                write("the GPU's memory does not suffice for this conversation; /reset makes room")


def _can_compare(recipe: Recipe, sampler: Sampler, write: Callable[[str], None]) -> bool:
    """Whether the reference can be had, and, by `write`, why not: a run may have been copied without it."""
    try:
        place_reference(recipe, sampler)
    except ToolkitError as error:
        write(f"{error}")
        return False
    return True


def _exchange(
    recipe: Recipe, samplers: dict[str, Sampler], messages: Messages, line: str, write: Callable[[str], None]
) -> Messages:
    """The conversation with one more line and its response."""
    asked = [*messages, {"role": "user", "content": line}]
    row = {"input_ids": list(recipe.task.prompt_ids(asked))}
    said = {}
    for name, sampler in samplers.items():
        if len(samplers) > 1:
            write(f"[{name}]")
        streamer = _Streamer(recipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
        rollout = sampler(sampler.collator([row]), streamer=streamer)
        (said[name],) = rollout.responses
        if not rollout.ended[0]:
            more = f"cut at {sampler.response_length} tokens; a larger --max-new-tokens lets it say more"
            full = f"cut after {rollout.lengths[0]} tokens, where the base's positions end; /reset makes room"
            write(f"({more if rollout.lengths[0] >= sampler.response_length else full})")
    # The space around a turn is the form's.
    return [*asked, {"role": "assistant", "content": said["policy"].strip()}]
