"""One update of PPO, phase by phase, by the code that does it: what is counted is what runs."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, Trainer, TrainingArguments

from toolkit.costs.counted import Costs, Counted, Kernel, as_on_a_card
from toolkit.costs.outline import alike, truncated
from toolkit.data import Rollout
from toolkit.functional import inverse_cdf
from toolkit.models import InRole, SharedBase, planned_for_cpu, sequence_logits
from toolkit.trainers.common import precision
from toolkit.trainers.objective import Experience
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.rollouts import Rollouts

_TOKEN = 1  # any
_FEW = 2  # layers from which those of a deep model are told
PHASES = ("rollout", "score", "read", "update", "evaluation")


@dataclass(frozen=True)
class Phase:
    """A part of an update: what it costs once, and how often it is done."""

    name: str
    costs: Costs
    times: float


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and response, and of both together, where less.

    A batch is made of its longest prompt and its longest response, which are of two rows; what reads rows has the
    longest row.
    """

    prompt: int
    response: int
    both: int | None = None

    @property
    def of_a_row(self) -> "Lengths":
        """Those of the longest row, with a response as long as it can be."""
        if self.both is None or self.prompt + self.response <= self.both:
            return Lengths(self.prompt, self.response)
        response = min(self.response, max(1, self.both - 1))
        return Lengths(max(1, self.both - response), response)


class _Cache(DynamicCache):
    def __init__(self, counted: Counted, config: Any):
        super().__init__(config=config)
        self._counted = counted
        self.tokens = 0  # which a layer without keys does not know
        self.is_used = True

    def update(self, *arguments: Any, **named: Any) -> Any:
        kept = super().update(*arguments, **named)
        for tensor in kept:
            self._counted.keep(tensor, "KV cache")
        return kept


def of_all_layers(roles: SharedBase, count: Callable[[], list[Phase]], args: Any) -> list[Phase]:
    """What is counted of a base. Layers that are all alike are counted two and three at a time: what the third one
    adds, the others do, unless every n-th one is checkpointed."""
    number = alike(roles)
    if number is None or number <= _FEW + 1 or "every_n_layers" in (args.gradient_checkpointing_kwargs or {}):
        return count()
    with truncated(roles, _FEW):
        few = count()
    with truncated(roles, _FEW + 1):
        more = count()
    pairs = zip(few, more, strict=True)
    return [replace(a, costs=a.costs.with_more_layers(b.costs, number - _FEW)) for a, b in pairs]


@contextmanager
def learning(counted: Counted, roles: SharedBase, args: Any, *, further: bool, copied: bool = False) -> Iterator[Costs]:
    """Inside is a micro-batch forward and backward; a `further` one on top of the gradients of an earlier one, of which
    there is a copy where they are `copied`, to come back to if memory runs out."""
    trained, copies = roles.trained_parameters, []
    if further:
        with counted.phase():  # none of those that were counted before
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
                copies += [torch.empty_like(parameter)] if copied else []
                for gradient in (parameter.grad, *copies[-1:]):
                    counted.keep(gradient, "gradients")

    def named(parameter: Any) -> None:
        counted.keep(parameter.grad, "gradients")

    hooks = [parameter.register_post_accumulate_grad_hook(named) for parameter in trained]
    roles.train()
    if args.gradient_checkpointing:
        given = dict(args.gradient_checkpointing_kwargs or {})
        given.pop("offload", None)  # what it moves to the host's memory is counted here, as if it stayed
        every = given.pop("every_n_layers", 1)  # which transformers' trainer takes out, too
        roles.gradient_checkpointing_enable(given, **({} if every == 1 else {"every_n_layers": every}))
    try:
        with counted.phase() as costs:
            yield costs
    finally:
        roles.gradient_checkpointing_disable()
        roles.eval()
        for parameter in trained:  # of layers that are left out, too
            parameter.grad = None
        copies.clear()
        for hook in hooks:
            hook.remove()


@contextmanager
def unpacked(counted: Counted, roles: SharedBase, *, on_cpu: bool) -> Iterator[None]:
    """Inside, weights are unpacked as they are on a CPU for passes with gradients."""
    with ExitStack() as held:
        if on_cpu:
            with counted.phase(leaves="copied weights"):
                held.enter_context(roles.unpacked_for_gradients(on_cpu=True))
        yield


class CountedUpdate:
    """An update on roles without numbers.

    Args:
        roles: as `take_shape` leaves them.
        args: of the ppo stage.
        lengths: of the rows, which are as long as they can be.
        evaluated: of the rows of an evaluation, where they are others.
        on_cpu: whether it is for a CPU, where 4-bit layers are unpacked for the whole of a rollout, and of an update.
    """

    def __init__(
        self,
        counted: Counted,
        roles: SharedBase,
        args: PPOConfig,
        lengths: Lengths,
        *,
        evaluated: Lengths | None = None,
        on_cpu: bool = False,
    ):
        self.on_cpu, self.evaluated = on_cpu, evaluated or lengths
        self.counted, self.roles, self.args = counted, roles, args
        self.generated, self.lengths = lengths, lengths.of_a_row
        self.tokenizer: Any = SimpleNamespace(pad_token_id=0)
        self.autocast = precision(args, roles)
        roles.train_roles("policy", "value")
        roles.eval()

    def _rollout(self, rows: int, *, ended: bool = True) -> Rollout:
        lengths, texts = self.lengths, [""] * rows
        ids = [[_TOKEN] * lengths.prompt] * rows, [[_TOKEN] * lengths.response] * rows
        return Rollout(texts, texts, *ids, ended=[ended] * rows)

    # ------------------------------------------------------------------ the phases

    def phases(self, *names: str) -> list[Phase]:
        """Those of these names of all layers, in their order; all of an update, and an evaluation, if none is named.

        A "rollout" is prefill, decode, and what its tokens would be by the base alone, "merged".
        """

        def count() -> list[Phase]:
            return [phase for name in names or PHASES for phase in self._parts(name)]

        with planned_for_cpu() if self.on_cpu else as_on_a_card():
            return of_all_layers(self.roles, count, self.args)

    def _parts(self, name: str) -> list[Phase]:
        args, batch = self.args, self.args.update_batch_size
        rows = min(args.local_rollout_forward_batch_size, batch)
        if name == "rollout":
            merged = args.generation == "merged"
            prefill, ends, alone = self._decoding(self.generated, args.rollout_batch_size, merged=merged)
            tokens = args.rollouts_per_update * (self.generated.response - 1)
            # A token costs more the further on it is: half of them as the first, half as the last.
            halves = [
                Phase(of, costs, tokens / 2) for of, two in (("decode", ends), ("merged", alone)) for costs in two
            ]
            return [Phase("prefill", prefill, args.rollouts_per_update), *halves]
        if name == "evaluation":  # no part of an update
            return [Phase(name, costs, 0) for costs in self._evaluation()]
        if name == "update":
            steps = min(args.num_mini_batches, batch)
            mini_batch = batch // steps
            rows = min(args.per_device_train_batch_size, mini_batch)
            update = Phase(name, self._learning(rows, further=mini_batch > rows), args.num_ppo_epochs * batch / rows)
            return [update, Phase("optimizer", self._stepping(), args.num_ppo_epochs * steps)]
        return [Phase(name, self._scoring(rows) if name == "score" else self._reading(rows), batch / rows)]

    def _evaluation(self) -> Iterator[Costs]:
        """What an evaluation does: it responds, reads the responses and has them scored."""
        rows = min(self.args.local_rollout_forward_batch_size, self.args.per_device_eval_batch_size)
        prefill, (_, last), _ = self._decoding(self.evaluated, self.args.per_device_eval_batch_size)
        learnt, self.lengths = self.lengths, self.evaluated.of_a_row
        try:
            scoring = [self._scoring(rows, role=role) for role in ("reward", "judge") if role in self.roles.roles]
            yield from (prefill, last, self._reading(rows), *scoring)
        finally:
            self.lengths = learnt

    @torch.no_grad()
    def _decoding(
        self, lengths: Lengths, rows: int, *, merged: bool = False
    ) -> tuple[Costs, tuple[Costs, Costs], tuple[Costs, Costs]]:
        """Prompts of so many rows, the first token after them and the last one; and these two by the base alone."""
        cache, most, (positions, _) = _Cache(self.counted, self.roles.config), math.inf, self.roles.positions
        if positions is not None and self.roles.padding_takes_positions:
            lengths, most = lengths.of_a_row, positions - 2  # a table, of which two tokens at the end need a place each
        with ExitStack() as held, self.roles.role("policy"), self.autocast():
            held.enter_context(self.roles.weights_kept())
            if merged or self.on_cpu:
                with self.counted.phase(leaves="copied weights"):
                    held.enter_context(self.roles.unpacked(merged=merged, on_cpu=self.on_cpu))
            with self.counted.phase() as prefill:
                self._forward(rows, int(min(lengths.prompt, most - 2)), cache)
            first, first_alone = self._tokens(rows, cache)
            if (missing := int(min(lengths.prompt + lengths.response - 1, most)) - cache.tokens) > 0:
                with self.counted.phase():  # of all tokens but the last there are keys and values
                    self._forward(rows, missing, cache)
            last, last_alone = self._tokens(rows, cache)
            return prefill, (first, last), (first_alone, last_alone)

    def _tokens(self, rows: int, cache: "_Cache") -> tuple[Costs, Costs]:
        """A token of each row, and one by the base alone."""
        with self.counted.phase() as costs:
            self._forward(rows, 1, cache)
        with InRole(self.roles, None), self.counted.phase() as alone:
            self._forward(rows, 1, cache)
        return costs, alone

    def _forward(self, rows: int, tokens: int, cache: "_Cache") -> None:
        """A step of generation, and the draw from the logits of its last token."""
        known = inspect.signature(self.roles.causal_lm.forward).parameters
        last_alone = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        cache.tokens += tokens
        ids, mask = (
            torch.ones(rows, tokens if cache.is_used else cache.tokens).long(),
            torch.ones(rows, cache.tokens).long(),
        )
        name = "cache_params" if "cache_params" in known else "past_key_values"
        given: dict[str, Any] = {name: cache, "attention_mask": mask}
        if name == "cache_params" and tokens < cache.tokens:  # Mamba reads no mask after the prompts
            given["attention_mask"] = None
        output = self.roles(input_ids=ids, use_cache=True, **given, **last_alone)
        cache.is_used = getattr(output, name, None) is not None  # openai-gpt has none
        uniform = torch.zeros(rows, dtype=torch.float64)
        inverse_cdf(output.logits[:, -1, :].to(torch.float32, copy=True), uniform, temperature=self.args.temperature)

    @torch.no_grad()
    def _scoring(self, rows: int, role: str = "reward") -> Costs:
        ids = torch.ones(rows, self.lengths.prompt + self.lengths.response).long()
        with self.counted.phase() as costs, self.autocast():
            sequence_logits(self.roles, ids, torch.ones_like(ids), pad_token_id=self.tokenizer.pad_token_id, role=role)
        return costs

    def _reading(self, rows: int) -> Costs:
        args = self.args
        with unpacked(self.counted, self.roles, on_cpu=self.on_cpu), self.counted.phase() as costs:
            rollouts = Rollouts(args, self.tokenizer, self.roles, self.autocast)
            rollouts.read(self._rollout(rows), full_kl=args.kl_estimator == "full")
            if args.truncated_as == "bootstrap":
                rollouts.values_after(self._rollout(rows, ended=False))
        return costs

    def _learning(self, rows: int, *, further: bool) -> Costs:
        """A micro-batch, a `further` one on top of the gradients of an earlier one."""
        args, roles = self.args, self.roles
        trainer: Any = object.__new__(PPOTrainer)
        vars(trainer).update(
            args=args,
            roles=roles,
            kl_coef=args.kl_coef,
            rollouts=Rollouts(args, self.tokenizer, roles, self.autocast),
            compute_loss_context_manager=self.autocast,
            accelerator=SimpleNamespace(scaler=None),
            _ratio_checked=True,
        )
        per_token, per_row = torch.zeros(rows, self.lengths.response), torch.zeros(rows)
        mask, read, rest = torch.ones_like(per_token, dtype=torch.bool), (per_token,) * 3, (per_token,) * 4
        experience = Experience(self._rollout(rows), mask, *read, per_row, per_row, *rest)
        step = partial(trainer._backward_micro_batch, experience, list(range(rows)), 1.0)
        with (
            unpacked(self.counted, roles, on_cpu=self.on_cpu),
            learning(self.counted, roles, args, further=further) as costs,
        ):
            step()
        return costs

    def _stepping(self) -> Costs:
        """An optimizer's step: gradients are read for their norm, read and written where they are clipped, and read
        again by the optimizer, which reads and writes weights and state."""
        trained = list(self.roles.trained_parameters)
        state = optimizer_bytes(self.args) * sum(p.numel() for p in trained)
        moved = 6 * sum(p.nbytes for p in trained) + 2 * state
        return Costs(Counter({Kernel(0.0, moved, torch.float32): 1}))


def optimizer_bytes(args: TrainingArguments) -> float:
    """Bytes of an optimizer's state for each number that trains: tried, or what AdamW has where that takes a card."""
    # So large that of 8 bits the tables hardly count; without a draw, which would change those of who asks.
    layer = torch.nn.utils.skip_init(torch.nn.Linear, 1024, 1024, bias=False)
    torch.nn.init.zeros_(layer.weight)
    kind, arguments = Trainer.get_optimizer_cls_and_kwargs(args, layer)
    optimizer = kind(layer.parameters(), **arguments)
    layer(torch.ones(1, 1024)).sum().backward()
    try:
        optimizer.step()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return 2.0 if "8bit" in args.optim.value else 8.0
    state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in state if t.numel() > 1) / layer.weight.numel()
