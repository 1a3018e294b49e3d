"""One update of PPO, phase by phase, by the code that does it: what is counted is what runs."""

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, Trainer, TrainingArguments

from toolkit.costs.counted import Costs, Counted, Kernel, as_on_a_card
from toolkit.costs.passes import TOKEN, Phase, learning, of_all_layers, unpacked
from toolkit.data import Rollout
from toolkit.errors import ConfigError
from toolkit.functional import inverse_cdf
from toolkit.models import CACHE, InRole, RecordedPass, SharedBase, planned_for_cpu, scores_for, sequence_logits
from toolkit.trainers.common import precision
from toolkit.trainers.objective import Experience
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.rollouts import Rollouts

PHASES = ("rollout", "score", "read", "update", "evaluation")


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
        return Lengths(max(1, self.both - self.response), self.response)


@dataclass(frozen=True)
class _Decoding:
    """What responses cost.

    Args:
        prefill: of the prompts.
        ends: of the first token after them, and of the last one.
        by_graphs: of any token by the pass that is recorded, of that by the base alone, and of the draw from its
            logits, which is not recorded; None for a base that has no graphs, or on a CPU.
    """

    prefill: Costs
    ends: tuple[Costs, Costs]
    by_graphs: tuple[Costs, Costs, Costs] | None


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
        with roles.role("policy"), self.autocast():  # whether there is room for all layers, of which few are counted
            self._unpacked = {way: roles.to_unpack(merged=way, on_cpu=on_cpu) for way in (False, True)}
        roles.train_roles("policy", "value")
        roles.eval()

    def _rollout(self, rows: int, *, ended: bool = True) -> Rollout:
        lengths, texts = self.lengths, [""] * rows
        ids = [[TOKEN] * lengths.prompt] * rows, [[TOKEN] * lengths.response] * rows
        return Rollout(texts, texts, *ids, ended=[ended] * rows)

    # ------------------------------------------------------------------ the phases

    def phases(self, *names: str) -> list[Phase]:
        """Those of these names of all layers, in their order; all of an update, and an evaluation, if none is named.

        A "rollout" is prefill, decode, and what its tokens would be on a card by "graphs", and by these of the base
        alone, "merged", of bases that have them.
        """

        def count() -> list[Phase]:
            return [phase for name in names or PHASES for phase in self._parts(name)]

        with planned_for_cpu() if self.on_cpu else as_on_a_card():
            return of_all_layers(self.roles, count, self.args)

    def _parts(self, name: str) -> list[Phase]:
        args, batch = self.args, self.args.update_batch_size
        rows = min(args.local_rollout_forward_batch_size, batch)
        if name == "rollout":
            tokens = args.rollouts_per_update * (self.generated.response - 1)
            rows, merges = args.rollout_batch_size, args.decoding["merged"]
            made = self._decoding(self.generated, rows, graphs=not self.on_cpu, merged=merges)
            # A token costs more the further on it is: half of them as the first, half as the last.
            decode = [Phase("decode", costs, tokens / 2) for costs in made.ends]
            others = []
            if made.by_graphs is not None:
                token, alone, draw = made.by_graphs
                graphs = [Phase("graphs", token, tokens, recorded=True), Phase("graphs", draw, tokens)]
                merged = [Phase("merged", alone, tokens, recorded=True, merged=True), Phase("merged", draw, tokens)]
                others = [*graphs, *merged]
                if args.decoding["graphs"]:
                    decode = [replace(phase, name="decode") for phase in graphs]
            return [Phase("prefill", made.prefill, args.rollouts_per_update), *decode, *others]
        if name == "evaluation":  # no part of an update
            return [Phase(name, costs, 0) for costs in self._evaluation()]
        if name == "update":
            steps = min(args.num_mini_batches, batch)
            mini_batch = batch // steps
            rows = min(args.per_device_train_batch_size, mini_batch)
            update = Phase(name, self._learning(rows, further=mini_batch > rows), args.num_ppo_epochs * batch / rows)
            return [update, Phase("optimizer", self._stepping(), args.num_ppo_epochs * steps)]
        read = self._scoring(rows, "reward") if name == "score" else [self._reading(rows)]
        return [Phase(name, costs, batch / rows) for costs in read]

    def _evaluation(self) -> Iterator[Costs]:
        """What an evaluation does: it responds, reads the responses and has them scored."""
        rows = min(self.args.local_rollout_forward_batch_size, self.args.per_device_eval_batch_size)
        made = self._decoding(self.evaluated, self.args.per_device_eval_batch_size, graphs=False)
        learnt, self.lengths = self.lengths, self.evaluated.of_a_row
        try:
            yield from (made.prefill, made.ends[1], self._reading(rows), *self._scoring(rows, "reward", "judge"))
        finally:
            self.lengths = learnt

    @torch.no_grad()
    def _decoding(self, lengths: Lengths, rows: int, *, graphs: bool, merged: bool = False) -> "_Decoding":
        cache, most, (positions, _) = _Cache(self.counted, self.roles.config), math.inf, self.roles.positions
        if positions is not None and self.roles.padding_takes_positions:
            lengths, most = lengths.of_a_row, positions - 2  # a table, of which two tokens at the end need a place each
        with ExitStack() as held, self.roles.role("policy"), self.autocast():
            held.enter_context(self.roles.weights_kept())
            if merged or self.on_cpu:
                with self.counted.phase(leaves="copied weights"):
                    layers = self._unpacked[merged]
                    held.enter_context(self.roles.unpacked(merged=merged, on_cpu=self.on_cpu, layers=layers))
            with self.counted.phase() as prefill:
                self._forward(rows, int(min(lengths.prompt, most - 2)), cache)
            with self.counted.phase() as first:
                self._forward(rows, 1, cache)
            if (missing := int(min(lengths.prompt + lengths.response - 1, most)) - cache.tokens) > 0:
                with self.counted.phase():  # of all tokens but the last there are keys and values
                    self._forward(rows, missing, cache)
            with self.counted.phase() as last:
                self._forward(rows, 1, cache)
            by_graphs = self._by_graphs(rows, cache) if graphs else None
        return _Decoding(prefill, (first, last), by_graphs)

    def _by_graphs(self, rows: int, cache: "_Cache") -> tuple[Costs, Costs, Costs] | None:
        try:
            step = RecordedPass(self.roles.causal_lm, cache.tokens)
        except ConfigError:
            if self.args.decoding["graphs"]:
                raise
            return None
        token = torch.ones(rows, 1).long()
        given = {"input_ids": token, "position_ids": token, CACHE: cache, "use_cache": True}
        given |= self._last_alone
        with self.counted.phase():  # which makes the room for all tokens: a layer's keys and values are there twice
            step.plain(**given)
        with self.counted.phase() as recorded:
            logits = step.plain(**given).logits
        with self.counted.phase() as draw:
            self._draw(logits)
        with InRole(self.roles, None), self.counted.phase() as alone:
            step.plain(**given)
        return recorded, alone, draw

    def _forward(self, rows: int, tokens: int, cache: "_Cache") -> None:
        """A step of generation, and the draw from the logits of its last token."""
        known = self._known
        cache.tokens += tokens
        ids, mask = (
            torch.ones(rows, tokens if cache.is_used else cache.tokens).long(),
            torch.ones(rows, cache.tokens).long(),
        )
        name = "cache_params" if "cache_params" in known else CACHE  # that of Mamba before transformers 5.24
        given: dict[str, Any] = {name: cache, "attention_mask": mask}
        if all(cache.is_linear) and tokens < cache.tokens:  # Mamba reads no mask after the prompts
            given["attention_mask"] = None
        output = self.roles(input_ids=ids, use_cache=True, **given, **self._last_alone)
        cache.is_used = getattr(output, name, None) is not None  # openai-gpt has none
        self._draw(output.logits)

    @property
    def _known(self) -> Mapping[str, Any]:
        return inspect.signature(self.roles.causal_lm.forward).parameters

    @property
    def _last_alone(self) -> dict[str, int]:
        return {"logits_to_keep": 1} if "logits_to_keep" in self._known else {}

    def _draw(self, logits: torch.Tensor) -> None:
        uniform = torch.zeros(len(logits), dtype=torch.float64)
        inverse_cdf(logits[:, -1, :].to(torch.float32, copy=True), uniform, temperature=self.args.temperature)

    @torch.no_grad()
    def _scoring(self, rows: int, *whose: str) -> Iterator[Costs]:
        """Of each role on the base that scores for them; of none, where all that score are elsewhere."""
        ids = torch.ones(rows, self.lengths.prompt + self.lengths.response).long()
        read = {"attention_mask": torch.ones_like(ids), "pad_token_id": self.tokenizer.pad_token_id}
        for role in (role for role in self.roles.roles if scores_for(role) in whose):
            with self.counted.phase() as costs, self.autocast(), self.roles.weights_kept():
                sequence_logits(self.roles, ids, role=role, **read)
            yield costs

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
        with unpacked(self.counted, roles, on_cpu=self.on_cpu), roles.weights_kept():
            if further:  # the first one has left the adapters in the precision of the passes
                with self.counted.phase(), torch.no_grad(), self.autocast():
                    for role in roles.trained_roles:
                        with roles.role(role):
                            roles.hidden_states(torch.tensor([[TOKEN]]), None)
            with learning(self.counted, roles, args, further=further) as costs:
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
        with warnings.catch_warnings():  # of what it does in place of paging here, on a CPU
            warnings.simplefilter("ignore")
            optimizer.step()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return 2.0 if "8bit" in args.optim.value else 8.0
    state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in state if t.numel() > 1) / layer.weight.numel()
