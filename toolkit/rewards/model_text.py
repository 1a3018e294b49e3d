"""What a reward model with a tokenizer of its own reads of a rollout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from toolkit.data.chat_template import render
from toolkit.data.files import without_added
from toolkit.data.messages import without_empty
from toolkit.errors import ColumnError, Problem, RewardError
from toolkit.models import positions_of
from toolkit.rewards.scorer import ClassScorer, Prompts, ScorerContext, at_row, named_classes
from toolkit.settings import AT_LEAST_1, setting

Reads = Literal["conversation", "text", "pair", "response", "tokens"]
# The prompt itself: `rollout.prompts` has the policy's special tokens and template in it.
_PROMPT_COLUMNS = ("messages", "prompt")
_NAME_ONE = "Name the column with the prompt as text or messages, or let the response alone be read (reads: response)."
_ENDLESS = 10**6  # tokenizers say 10³⁰ where they know no limit


@dataclass(kw_only=True)
class TextScorer(ClassScorer):
    """How a sequence classifier with a tokenizer of its own reads a rollout."""

    reads: Reads | None = setting(
        None,
        "prompt and response in its chat template, one after the other, as a pair of texts, the response alone, or the "
        "policy's own tokens; null is its chat template if it has one, else text, and tokens for the model that the "
        "reward stage trains.",
    )
    prompt_column: str | None = setting(
        None, "the column with the prompt as text or messages; null is `messages`, else `prompt`."
    )
    max_length: int | None = setting(
        None, "tokens; a longer text loses its beginning. null is what the model takes.", AT_LEAST_1
    )
    batch_size: int = setting(16, "responses per forward pass.", AT_LEAST_1)

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if self.prompt_column is not None and self.reads in ("response", "tokens"):
            what = "the response alone is" if self.reads == "response" else "the policy's own tokens are"
            yield Problem(f"would have no effect: {what} read.", "prompt_column")

    def column_of(self, columns: Sequence[str], *, chats: bool = False) -> str | None:
        """The column with the prompt; None where none is read.

        `chats` says that `prompt` has the chat template of the base around it. Raises: RewardError: there is no column,
        or none without that template.
        """
        if self.reads in ("response", "tokens"):
            return None
        names = _PROMPT_COLUMNS if self.prompt_column is None else (self.prompt_column,)
        column = next((name for name in names if name in columns), None)
        if column is None:
            wrong = f"the prompts have no column {' or '.join(names)}; present: {', '.join(columns) or 'none'}."
            raise ColumnError(wrong, field="prompt_column", remedy=_NAME_ONE)
        if column == "prompt" and self.prompt_column is None and chats:
            wrong = "the column prompt is already in the base's chat template, and this model may use another."
            raise RewardError(wrong, field="prompt_column", remedy=_NAME_ONE)
        return column

    def prompts_in(
        self, columns: Mapping[str, Sequence[Any]], *, places: Sequence[str] = (), chats: bool = False
    ) -> list[Any] | None:
        """The prompt of each row as text or messages; None where none is read.

        `places` are those of the rows, for a person. Raises: RewardError: as `column_of`, or a row has none.
        """
        column = self.column_of(list(columns), chats=chats)
        if column is None:
            return None
        prompts = list(columns[column])
        if self.prompt_column is None and "prompt" in columns:  # of mere text there are no messages
            prompts = [
                text if prompt is None else prompt for prompt, text in zip(prompts, columns["prompt"], strict=True)
            ]
        for row, prompt in enumerate(prompts):
            turns = prompt if isinstance(prompt, list) else []
            messages = turns and all(isinstance(turn, dict) and "content" in turn for turn in turns)
            if not messages and not (isinstance(prompt, str) and prompt):
                place = f"{places[row]}: " if places else ""
                wrong = f'{place}column "{column}" holds {prompt!r}, which is neither text nor messages.'
                raise RewardError(wrong, field="prompt_column")
        return prompts

    def check_prompts(self, context: ScorerContext, template: PreTrainedTokenizerBase | None, prompts: Prompts) -> None:
        """Raises: RewardError: no column with the prompt, a row without one, or one whose roles the chat template of a
        tokenizer refuses."""
        if not context.reads_rows:
            self.column_of(prompts.rows.column_names, chats=context.chats)
            return
        read = ("messages", "prompt", self.prompt_column)
        columns = {name: prompts.rows[name][:] if name in read else () for name in prompts.rows.column_names}
        found = self.prompts_in(columns, places=prompts.places, chats=context.chats)
        if template is None or found is None:
            return
        first: dict[str, int] = {}  # rows by their roles, on which what a template refuses depends
        for row, prompt in enumerate(found):
            turns = [{"role": "user"}] if isinstance(prompt, str) else prompt
            first.setdefault(repr([turn.get("role") if isinstance(turn, dict) else turn for turn in turns]), row)
        for row in first.values():
            with at_row(prompts.places[row]):
                conversation(template, found[row], "Yes.")

    def fitted(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, whose: str, passed_over: int = 0
    ) -> tuple[Reads, int | None]:
        """`reads` and `max_length` for a model, which leaves so many of its positions unused; without a limit, that is
        None.

        Raises:
            RewardError: outputs that do not fit `class_column` or `wanted_class`, a conversation without a chat
                template, or more tokens than the model takes.
        """
        self.check_outputs(config.num_labels, named_classes(config), whose=whose)
        if self.reads == "conversation" and tokenizer.chat_template is None:
            wrong = "conversation needs a chat template, and the model's tokenizer has none."
            raise RewardError(wrong, field="reads", remedy="Use text, pair or response.")
        positions = positions_of(config)
        usable = None if positions is None else positions - passed_over
        limits = [n for n in (usable, tokenizer.model_max_length) if isinstance(n, int) and 0 < n < _ENDLESS]
        if self.max_length is not None and limits and self.max_length > min(limits):
            wrong = f"{self.max_length} tokens, and the model takes {min(limits)}."
            raise RewardError(wrong, field="max_length", remedy="Lower it.")
        reads = self.reads or ("text" if tokenizer.chat_template is None else "conversation")
        return reads, self.max_length or min(limits, default=None)


def conversation(tokenizer: PreTrainedTokenizerBase, prompt: Any, response: str) -> str:
    """Prompt and response in a chat template; a prompt of text is one message of the user.

    Raises: RewardError: the template refuses it.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        answered = [*map(without_empty, without_added(messages)), {"role": "assistant", "content": response}]
        return render(tokenizer, answered)
    except Exception as error:  # of jinja2, of a limit, and of whatever a template does in Python
        wrong = f"the model's chat template refuses a conversation ({error}): {messages!r}."
        raise RewardError(wrong, field="reads", remedy="Mend the row, or use pair or text.") from error
