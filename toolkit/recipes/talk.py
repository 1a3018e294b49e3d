"""Talk to a trained policy, and to the reference beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig, TextStreamer

from toolkit.data import messages_of_row, pad_rows, read_rows, renamed
from toolkit.errors import DataError
from toolkit.models import SharedBase
from toolkit.recipes.finished import policy_and_reference
from toolkit.recipes.recipe import Recipe
from toolkit.reports import write_jsonl

REPLY_ROLES = ("policy", "reference")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Speaker:
    """The policy and the reference of a finished run, ready to answer.

    Args:
        recipe: of the run.
        roles: the base with both.
        max_new_tokens: of an answer; the recipe's `ppo.response_length` if None.
        temperature: of sampling; 0 decodes greedily.
        batch_size: prompts answered at a time.
    """

    recipe: Recipe
    roles: SharedBase
    max_new_tokens: int | None = None
    temperature: float = 1.0
    batch_size: int = 8

    stage: ClassVar[str] = "ppo"  # whose settings answers follow

    @classmethod
    def of_run(cls, recipe: Recipe, **settings: Any) -> "Speaker":
        """Load base, policy and reference of a finished run."""
        return cls(recipe, policy_and_reference(recipe), **settings)

    @property
    def longest(self) -> int:
        """Tokens of an answer at most."""
        return self.max_new_tokens or int(self.recipe.stage_config(self.stage).response_length)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """A conversation as the recipe's data makes prompts: by chat template, or its last message as plain text."""
        return list(self.recipe.task.prompt_ids(messages))

    def answer(
        self, prompts: Sequence[Sequence[int]], *, role: str = "policy", streamer: TextStreamer | None = None
    ) -> list[str]:
        """One answer to each prompt.

        Args:
            prompts: token ids.
            role: "policy" or "reference".
            streamer: shows tokens as they come, for one prompt.
        """
        answers: list[str] = []
        for start in range(0, len(prompts), self.batch_size):
            answers += self._answer_some(prompts[start : start + self.batch_size], role, streamer)
        return answers

    def _answer_some(self, prompts: Sequence[Sequence[int]], role: str, streamer: TextStreamer | None) -> list[str]:
        tokenizer = self.recipe.tokenizer
        ids, mask = pad_rows(prompts, pad_token_id=tokenizer.pad_token_id, side="left")
        with self.roles.role(role), self.roles.autocast():
            output = self.roles.generate(
                ids.to(self.roles.device), mask.to(self.roles.device), self._generation_config(), streamer=streamer
            )
        stops = set(self._stops)
        rows = [list(takewhile(lambda token: token not in stops, row)) for row in output.tolist()]
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True))

    def _generation_config(self) -> GenerationConfig:
        sampling = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0} if self.temperature else {}
        return GenerationConfig(
            max_new_tokens=self.longest,
            do_sample=bool(self.temperature),
            eos_token_id=self._stops,
            pad_token_id=self.recipe.tokenizer.pad_token_id,
            **sampling,
        )

    @property
    def _stops(self) -> list[int]:
        return self.roles.stop_token_ids(self.recipe.tokenizer)


def _prompts(
    speaker: Speaker, texts: Sequence[str], file: Path | None, number: int
) -> tuple[list[str], list[list[int]]]:
    """Texts and token ids of the prompts to answer."""
    if texts or file is not None:
        conversations = [[{"role": "user", "content": text}] for text in texts]
        if file is not None:
            columns = getattr(speaker.recipe.task, "columns", None) or {}
            for place, row in read_rows(str(file), setting="--file"):
                mapped = renamed(place, row, columns) if set(columns.values()) <= set(row) else row
                conversations.append(messages_of_row(place, mapped))
        ids = [speaker.prompt_ids(messages) for messages in conversations]
        return [messages[-1]["content"] for messages in conversations], ids
    held_out = speaker.recipe.task.prompts("test")
    ids = held_out["input_ids"][:number]
    return list(speaker.recipe.tokenizer.batch_decode(ids)), ids


def answer_all(
    speaker: Speaker,
    *,
    texts: Sequence[str] = (),
    file: Path | None = None,
    number: int = 5,
    compare: bool = False,
    output: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, str]]:
    """Answer prompts and show them: those given, those of a file, or the first held-out ones.

    Args:
        speaker: answers.
        texts: prompts.
        file: more prompts, in any format of the data section.
        number: held-out prompts, where neither is given.
        compare: whether the reference answers too.
        output: JSON Lines file to write.
        console: for what a person reads; standard output if None.

    Returns:
        A row a prompt: `prompt`, `policy`, and `reference` where it answers too.
    """
    prompts, ids = _prompts(speaker, texts, file, number)
    roles = REPLY_ROLES if compare else REPLY_ROLES[:1]
    answers = {role: speaker.answer(ids, role=role) for role in roles}
    rows = [{"prompt": prompt, **{role: answers[role][i] for role in roles}} for i, prompt in enumerate(prompts)]
    table = Table(show_lines=True)
    for name in ("prompt", *roles):
        table.add_column(name, overflow="fold", ratio=1)
    for row in rows:
        table.add_row(*(Text(text) for text in row.values()))  # Text: square brackets are no markup
    (console or Console()).print(table)
    if output is not None:
        write_jsonl(output, rows)
    return rows


def converse(
    speaker: Speaker, *, read: Callable[[str], str] = input, write: Callable[[str], None] = print, compare: bool = False
) -> None:
    """A conversation on the terminal, until the end of input.

    Lines that begin with a slash are commands: /reset forgets what was said, /compare shows the reference beside the
    policy or hides it, /quit ends. The policy's answers go on as the conversation.

    Args:
        speaker: answers.
        read: asks for a line; raises EOFError at the end.
        write: shows a line; tokens themselves are streamed to standard output.
        compare: whether the reference answers too.
    """
    remembers = speaker.recipe.task.chats
    write("/reset forgets, /compare shows the reference or hides it, /quit ends (so does Ctrl-D).")
    if not remembers:
        write("This recipe's prompts are plain text: each line is a prompt of its own.")
    messages: Messages = []
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/reset":
            messages = []
        elif line == "/compare":
            compare = not compare
            write(f"the reference is {'shown' if compare else 'hidden'}")
        elif line.startswith("/"):
            write(f"no command {line}; there are /reset, /compare and /quit")
        elif line:
            messages = _exchange(speaker, messages if remembers else [], line, write, compare)


def _exchange(speaker: Speaker, messages: Messages, line: str, write: Callable[[str], None], compare: bool) -> Messages:
    """The conversation with one more line and its answer; as it was, where the line cannot be a prompt."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        ids = speaker.prompt_ids(asked)
    except DataError as error:
        write(f"{error}")
        return messages
    said = {}
    for role in REPLY_ROLES if compare else REPLY_ROLES[:1]:
        if compare:
            write(f"[{role}]")
        streamer = TextStreamer(speaker.recipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
        said[role] = speaker.answer([ids], role=role, streamer=streamer)[0]
        if len(speaker.recipe.tokenizer.encode(said[role], add_special_tokens=False)) >= speaker.longest:
            write(f"(cut at {speaker.longest} tokens; --max-new-tokens lets it say more)")
    return [*asked, {"role": "assistant", "content": said["policy"]}]
