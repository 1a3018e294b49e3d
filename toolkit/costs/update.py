"""One update of PPO, phase by phase, by the code that does it: what is counted is what runs."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, Trainer, TrainingArguments

from toolkit.costs.counted import Costs, Counted, Kernel
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
    """Tokens of the longest prompt and response."""

    prompt: int
    response: int


class _Cache(DynamicCache):
    def __init__(self, counted: Counted, config: Any):
        super().__init__(config=config)
        self._counted = counted

    def update(self, *arguments: Any, **named: Any) -> Any:
        kept = super().update(*arguments, **named)
        for tensor in kept:
            self._counted.keep(tensor, "KV cache")
        return kept


def of_all_layers(roles: SharedBase, count: Callable[[], list[Phase]]) -> list[Phase]:
    """What is counted of a base. Layers that are all alike are counted two and three at a time: what the third one
    adds, the others do."""
    number = alike(roles)
    if number is None or number <= _FEW + 1:
        return count()
    with truncated(roles, _FEW):
        few = count()
    with truncated(roles, _FEW + 1):
        more = count()
    pairs = zip(few, more, strict=True)
    return [replace(a, costs=a.costs.with_more_layers(b.costs, number - _FEW)) for a, b in pairs]


@contextmanager
def learning(counted: Counted, roles: SharedBase, args: Any, *, further: bool) -> Iterator[Costs]:
    """Inside is a micro-batch forward and backward; a `further` one on top of the gradients of an earlier one."""
    trained = roles.trained_parameters
    if further:
        with counted.phase():  # none of those that were counted before
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
                counted.keep(parameter.grad, "gradients")

    def named(parameter: Any) -> None:
        counted.keep(parameter.grad, "gradients")

    hooks = [parameter.register_post_accumulate_grad_hook(named) for parameter in trained]
    roles.train()
    if args.gradient_checkpointing:
        roles.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    try:
        with counted.phase() as costs:
            yield costs
    finally:
        roles.gradient_checkpointing_disable()
        roles.eval()
        for parameter in trained:  # of layers that are left out, too
            parameter.grad = None
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
        lengths: of all rows, which are as long as they can be.
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
        self.counted, self.roles, self.args, self.lengths = counted, roles, args, lengths
        self.tokenizer: Any = SimpleNamespace(pad_token_id=0)
        self.autocast = precision(args, roles)
        roles.train_roles("policy", "value")
        roles.eval()

    def _rollout(self, rows: int) -> Rollout:
        lengths, texts = self.lengths, [""] * rows
        ids = [[_TOKEN] * lengths.prompt] * rows, [[_TOKEN] * lengths.response] * rows
        return Rollout(texts, texts, *ids, ended=[True] * rows)

    # ------------------------------------------------------------------ the phases

    def phases(self, *names: str) -> list[Phase]:
        """Those of these names of all layers, in their order; all of an update, and an evaluation, if none is named.

        A "rollout" is prefill, decode, and what its tokens would be by the base alone, "merged".
        """

        with planned_for_cpu() if self.on_cpu else nullcontext():
            return of_all_layers(self.roles, lambda: [phase for name in names or PHASES for phase in self._parts(name)])

    def _parts(self, name: str) -> list[Phase]:
        args, batch = self.args, self.args.update_batch_size
        rows = min(args.local_rollout_forward_batch_size, batch)
        if name == "rollout":
            prefill, *ends, merged = self.decoding(args.rollout_batch_size, merged=args.generation == "merged")
            tokens = args.rollouts_per_update * (self.lengths.response - 1)
            # A token costs more the further on it is: half of them as the first, half as the last.
            decode = [Phase("decode", costs, tokens / 2) for costs in ends]
            return [Phase("prefill", prefill, args.rollouts_per_update), *decode, Phase("merged", merged, tokens)]
        if name == "evaluation":  # no part of an update
            learnt, self.lengths = self.lengths, self.evaluated
            try:
                prefill, _, last, _ = self.decoding(args.per_device_eval_batch_size)
                parts = [prefill, last]
                parts += [self._scoring(rows, role="judge")] if "judge" in self.roles.roles else []
            finally:
                self.lengths = learnt
            return [Phase(name, costs, 0) for costs in parts]
        if name == "update":
            steps = min(args.num_mini_batches, batch)
            mini_batch = batch // steps
            rows = min(args.per_device_train_batch_size, mini_batch)
            update = Phase(name, self._learning(rows, further=mini_batch > rows), args.num_ppo_epochs * batch / rows)
            return [update, Phase("optimizer", self._stepping(), args.num_ppo_epochs * steps)]
        return [Phase(name, self._scoring(rows) if name == "score" else self._reading(rows), batch / rows)]

    @torch.no_grad()
    def decoding(self, rows: int, *, merged: bool = False) -> tuple[Costs, ...]:
        """Prompts of so many rows, the first token after them and the last one; and that by the base alone."""
        cache = _Cache(self.counted, self.roles.config)
        with ExitStack() as held, self.roles.role("policy"), self.autocast():
            held.enter_context(self.roles.weights_kept())
            if merged or self.on_cpu:
                with self.counted.phase(leaves="copied weights"):
                    held.enter_context(self.roles.unpacked(merged=merged, on_cpu=self.on_cpu))
            with self.counted.phase() as prefill:
                self._forward(rows, self.lengths.prompt, cache)
            with self.counted.phase() as first:
                self._forward(rows, 1, cache)
            self._fill(cache)
            with self.counted.phase() as last:
                self._forward(rows, 1, cache)
            with InRole(self.roles, None), self.counted.phase() as alone:
                self._forward(rows, 1, cache)
            return prefill, first, last, alone

    def _forward(self, rows: int, tokens: int, cache: DynamicCache) -> None:
        """A step of generation, and the draw from the logits of its last token."""
        known = inspect.signature(self.roles.causal_lm.forward).parameters
        last_alone = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        ids, mask = torch.ones(rows, tokens).long(), torch.ones(rows, cache.get_seq_length() + tokens).long()
        output = self.roles(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **last_alone)
        uniform = torch.zeros(rows, dtype=torch.float64)
        inverse_cdf(output.logits[:, -1, :].to(torch.float32, copy=True), uniform)

    def _fill(self, cache: DynamicCache) -> None:
        """Keys and values of all tokens but the last."""
        missing = self.lengths.prompt + self.lengths.response - 1 - cache.get_seq_length()
        with self.counted.phase():
            for index, layer in enumerate(cache.layers):
                if missing < 1 or layer.keys is None:  # a configuration may name more layers than are counted
                    continue
                rows, heads, _, size = layer.keys.shape
                cache.update(
                    *(kept.new_empty(rows, heads, missing, size) for kept in (layer.keys, layer.values)), index
                )

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
            accelerator=SimpleNamespace(backward=lambda loss: loss.backward()),
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
    layer = torch.nn.Linear(1024, 1024, bias=False)  # so large that of 8 bits the tables hardly count
    kind, arguments = Trainer.get_optimizer_cls_and_kwargs(args, layer)
    optimizer = kind(layer.parameters(), **arguments)
    layer(torch.ones(1, 1024)).sum().backward()
    try:
        optimizer.step()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return 2.0 if "8bit" in args.optim.value else 8.0
    state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in state if t.numel() > 1) / layer.weight.numel()
