"""Talk to a run whose q stage is finished: its answers by Q, and the reference's beside them."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, ClassVar

from transformers import TextStreamer

from toolkit.data import pad_rows
from toolkit.models import SharedBase, generate_by_q, load_role
from toolkit.recipes import assemble
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.talk import Speaker


class QSpeaker(Speaker):
    """A `Speaker` whose "policy" is that of Q; `temperature` is the τ of exp((Q − V) / τ), and 0 takes the largest Q.

    The reference beside it is sampled at temperature 1, or greedily where Q is.
    """

    stage: ClassVar[str] = "q"

    @classmethod
    def of_run(cls, recipe: Recipe, **settings: Any) -> "QSpeaker":
        """Load base, q and reference of a finished run."""
        roles = SharedBase(assemble.base_model(recipe))
        load_role(roles, "q", recipe.stage_folder("q") / "q")
        assemble.add_reference(recipe, roles)
        return cls(recipe, roles, **settings)

    def _answer_some(self, prompts: Sequence[Sequence[int]], role: str, streamer: TextStreamer | None) -> list[str]:
        tokenizer, device = self.recipe.tokenizer, self.roles.device
        ids, mask = pad_rows(prompts, pad_token_id=tokenizer.pad_token_id, side="left")
        with self.roles.autocast():
            output = generate_by_q(
                self.roles,
                ids.to(device),
                mask.to(device),
                max_new_tokens=self.longest,
                stop_token_ids=self._stops,
                pad_token_id=tokenizer.pad_token_id,
                temperature=self.temperature or None,
                by_q=role == "policy",
                streamer=streamer,
            )
        stops = set(self._stops)
        rows = [list(takewhile(lambda token: token not in stops, row)) for row in output.tolist()]
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True))
