"""From a recipe's sections to its plan."""

from dataclasses import replace
from typing import Any

from toolkit.data import Kind
from toolkit.errors import Problem
from toolkit.rewards import DEFAULT_KIND
from toolkit.spec.conflicts import conflicts
from toolkit.spec.plan import RESPONDING, Plan, StagePlan, adapter_roles, at, by_trl, scorer_parts, section
from toolkit.spec.sections import not_whole
from toolkit.spec.sources import BaseItself, CopyOf, Fresh, FreshQ, OwnBase, Saved, SharedWith, Source, Trained, Values
from toolkit.spec.trial import NO_RE_ENTRY
from toolkit.trainers.q_config import QConfig

# Arguments of `QBound`, and the settings that they are.
_OF_BOUND = {"lowest": "lowest_return", "highest": "highest_return", "scale": "bound_scale", "bias": "bound_bias"}

# Of the reward stage's section what its trainer of pairs reads, and that of classes does not.
_OF_PAIRS = ("center_rewards_coefficient", "pad_to_multiple_of", "disable_dropout", "activation_offloading")


def resolve(values: Values) -> Plan:
    """The plan of a recipe, whose sections may still have problems of their own."""
    return _Resolver(values).plan()


def _reads_own_role(values: Values, place: str) -> bool:
    """Whether the scorer or the judge, or a part of it, reads the role of its name."""
    adapters = (part for part in scorer_parts(values, place).values() if part.get("kind", DEFAULT_KIND) == "adapter")
    return any(not part.get("adapter") for part in adapters)


class _Resolver:
    def __init__(self, values: Values):
        self.values = values
        self.looked_up: set[str] = set()  # by the stage that is being planned
        self.problems: list[Problem] = []
        self.stages: dict[str, StagePlan] = {}
        self.random_base = at(values, "base.model") is None
        self.scores_by_role = _reads_own_role(values, "scorer")
        parts = [(part.get("kind"), part.get("model")) for part in scorer_parts(values).values()]
        self.scores_by_model = any(kind == "model" and model is None for kind, model in parts)

    def key(self, key: str) -> Any:
        """What stands at a dotted key, which decides the stage that is being planned; None where there is nothing."""
        self.looked_up.add(key)
        return at(self.values, key)

    def problem(self, key: str, wrong: str, remedy: str = "") -> None:
        problem = Problem(wrong, key, remedy)
        if problem not in self.problems:  # of several stages
            self.problems.append(problem)

    def plan(self) -> Plan:
        # What another one needs comes first.
        makers = {"sft": self._sft, "reward": self._reward, "collect": self._collect, "ppo": self._ppo, "q": self._q}
        for stage, make in makers.items():
            if stage in self.values:
                self.looked_up = {"seed", stage}
                made = make()
                before = [self.stages[other] for other in made.needs if other in self.stages]
                needs = dict.fromkeys([*(need for other in before for need in other.needs), *made.needs])
                reads = self.looked_up.union(*(other.reads for other in before))
                self.stages[stage] = replace(made, needs=tuple(needs), reads=frozenset(reads))
        more = (problem for problem in conflicts(self.values, self.stages) if problem not in self.problems)
        own = self.stages["reward"].own if self.scores_by_model and "reward" in self.stages else None
        return Plan(self.stages, (*self.problems, *more), own)

    # ------------------------------------------------------------------ the stages

    def _base(self) -> None:
        """Look up what the base and its tokenizer come from."""
        self.key("base")
        if self.random_base:
            self.key("data")

    def _stage_that_makes_the_base(self) -> list[str]:
        self._base()
        return ["sft"] if self.random_base and self.key("sft") is not None else []

    def _data(self, stage: str) -> None:
        if self.key(f"{stage}_data") is None:
            self.key("data")

    def _sft(self) -> StagePlan:
        self._data("sft")
        self._base()
        if self.random_base:
            return StagePlan("sft", rows="demonstrations")
        why = "4-bit weights have no gradients" if at(self.values, "base.quantization") else "all roles share it"
        policy = self._fresh("policy", f"the sft stage trains it. Full fine-tuning of the base is refused: {why}")
        return StagePlan("sft", (policy,), rows="demonstrations")

    def _reward(self) -> StagePlan:
        self._data("reward")
        labels = self._labels()
        if labels != 1 and at(self.values, "reward.loss") == "token_level":
            wrong = "token_level is of pairs, and reward_head.num_labels says classes."
            self.problem("reward.loss", wrong, "Remove one.")
        for name in _OF_PAIRS:
            if labels != 1 and at(self.values, f"reward.{name}") is not None:
                wrong = "would have no effect: it is of pairs, and reward_head.num_labels says classes."
                self.problem(f"reward.{name}", wrong, "Remove one.")
        if labels == 1 and at(self.values, "reward.label_smoothing_factor"):
            wrong = "would have no effect: it is of classes, and reward_head.num_labels says pairs."
            self.problem("reward.label_smoothing_factor", wrong, "Remove one.")
        if at(self.values, "reward.disable_dropout") is False and (
            at(self.values, "reward_model") is None or at(self.values, "adapters.reward") is not None
        ):
            wrong = "false would have no effect: a base under an adapter has no dropout, and the adapter keeps its own."
            self.problem("reward.disable_dropout", wrong, "Set adapters.reward.lora_dropout.")
        rows: Kind = "pairs" if labels == 1 else "labelled"
        if self.key("reward_model") is None:
            if at(self.values, "reward.use_liger_kernel"):
                wrong = (
                    "would have no effect: its kernels patch a whole model, and a role on the shared base is not one."
                )
                self.problem("reward.use_liger_kernel", wrong, "Leave it out.")
            if at(self.values, "reward.gradient_checkpointing_kwargs.use_reentrant"):
                self.problem("reward.gradient_checkpointing_kwargs", NO_RE_ENTRY, "Leave it out.")
            fresh = self._fresh("reward", "the reward stage trains it")
            reward = replace(fresh, head={"num_labels": labels})
            return StagePlan("reward", (reward,), rows=rows, needs=tuple(self._stage_that_makes_the_base()))
        self._base()
        lora = self._lora("reward")
        self._check_own_base("reward_model", "reward", lora)
        own = self._own_base("reward", "reward_model", "reward_model", lora)
        return StagePlan("reward", own=replace(own, num_labels=labels), rows=rows)

    def _collect(self) -> StagePlan:
        return self._scoring("collect", ())

    def _ppo(self) -> StagePlan:
        return self._scoring("ppo", (self._policy_start() or self._fresh("policy", "PPO trains it"),))

    def _q(self) -> StagePlan:
        given = self.key("q_data") is not None
        collected = not given and self.key("collect") is not None
        if given and "collect" in self.values:
            self.problem("collect", "would have no effect: q_data names the responses.")
        if not given and not collected:
            wrong = "has nothing to learn from: give rated responses (q_data), or sample them (collect)."
            self.problem("q", wrong)
        q, settings = self._fresh("q", "the q stage trains it"), section(self.values, "q")
        bound = {argument: settings.get(name, getattr(QConfig, name)) for argument, name in _OF_BOUND.items()}
        source = FreshQ("q", q.key, q.lora, bound=bound if settings.get("bound") == "sigmoid" else None)
        return replace(self._scoring("q", (source,), then=("collect",) if collected else ()), rows="rated")

    def _scoring(self, stage: str, roles: tuple[Source, ...], *, then: tuple[str, ...] = ()) -> StagePlan:
        """A stage in which responses are sampled and scored: its own roles, then reference, reward and value."""
        self.key("data")
        needs = self._stage_that_makes_the_base()
        start = self._policy_start()
        reference = BaseItself("reference", "base") if start is None else replace(start, role="reference")
        self.key("scorer")
        missing: Problem | None = None
        sources: list[Source] = [*roles, reference]
        if self.scores_by_role:
            reward = self._saved_reward()
            sources.append(reward)
            if reward.stage is not None and "reward" not in self.values:
                wrong = f'stage "{stage}" needs a trained reward role, and the recipe has no section "reward".'
                remedy = "Add one, name a trained adapter with start.reward=FOLDER, or score by something else "
                missing = Problem(wrong, remedy=f"{remedy}(scorer.kind).")
        if self.scores_by_model:
            needs += ["reward"] if self.key("reward") is not None and self.key("reward_model") is not None else []
        if stage == "ppo":
            value = self._value()
            sources += [] if value is None else [value]
        # Those that come last leave the weights of fresh roles drawn as without them.
        sources += self._further("scorer")
        if stage in RESPONDING and self.key("judge") is not None:
            sources += [*self._judge(), *self._further("judge")]
        needs += [source.stage for source in sources if source.stage is not None and source.stage in self.values]
        ordered = [name for name in ("sft", "reward") if name in needs]
        return StagePlan(stage, tuple(sources), needs=(*ordered, *then), missing=missing)

    # ------------------------------------------------------------------ the roles

    def _labels(self) -> int:
        return self.key("reward_head.num_labels") or 1

    def _lora(self, role: str) -> Values | None:
        key = f"adapters.{role}"
        return None if self.key(key) is None else section(self.values, key)

    def _fresh(self, role: str, why: str) -> Fresh:
        lora = self._lora(role)
        if lora is None:
            self.problem(f"adapters.{role}", f"is missing: {why}.")
        return Fresh(role, f"adapters.{role}", lora or {})

    def _trained(self, role: str, stage: str, **head: Any) -> Trained:
        """What another stage trains; it begins with an adapter that this one does not read."""
        lora = section(self.values, f"adapters.{role}")
        return Trained(role, stage, stage=stage, begins=Fresh(role, f"adapters.{role}", lora, head))

    def _policy_start(self) -> Saved | Trained | None:
        """The trained adapter with which the policy starts, and which the reference is a frozen copy of."""
        folder = self.key("start.policy")
        if folder:
            return Saved("policy", "start.policy", str(folder))
        return None if self.random_base or self.key("sft") is None else self._trained("policy", "sft")

    def _saved_reward(self) -> Saved | Trained:
        folder = self.key("start.reward")
        if folder:
            return Saved("reward", "start.reward", str(folder))
        self.key("reward")
        if "reward_model" in self.values:
            wrong = "adapter reads the reward role, and the reward stage trains reward_model."
            self.problem("scorer.kind", wrong, "Use kind: model.")
        return self._trained("reward", "reward", num_labels=self._labels())

    def _judge(self) -> list[Source]:
        """The role that a judge of kind adapter is read in."""
        if not _reads_own_role(self.values, "judge"):
            return []
        folder = self.key("start.judge")
        if not folder:
            wrong = "is missing: a judge of kind adapter needs one that this run's PPO does not train on."
            self.problem("start.judge", wrong, "Name another run's reward, such as runs/NAME/reward/reward.")
        return [Saved("judge", "start.judge", str(folder))] if folder else []

    def _further(self, place: str) -> list[Source]:
        """The roles of adapters that parts of a sum name themselves."""
        roles = adapter_roles(self.values, place)
        named = ((f"{key}.adapter", part.get("adapter")) for key, part in scorer_parts(self.values, place).items())
        sources = {roles[str(folder)]: (key, str(folder)) for key, folder in reversed([*named]) if str(folder) in roles}
        return [Saved(role, *sources[role]) for role in dict.fromkeys(roles.values())]

    def _value(self) -> Source | None:
        if section(self.values, "ppo").get("value", "separate") == "shared":
            return self._value_head_on_policy()
        if self.key("value_model") is not None:
            return self._value_on_own_base()
        start = self.key("start.value")
        if start == "reward" and self.key("reward_model") is not None:
            return self._value_as_reward_model()
        lora = self._lora("value")
        if start == "reward":
            if not self.scores_by_role:
                kind = section(self.values, "scorer").get("kind", DEFAULT_KIND)
                self.problem("start.value", f"is reward, but with scorer.kind: {kind} there is no reward role.")
            return CopyOf("value", "start.value", lora=lora)
        if start:
            return Saved("value", "start.value", str(start))
        if lora is None:
            wrong = "is missing: ppo.value is separate."
            self.problem("adapters.value", wrong, "Add it, or set ppo.value to shared.")
            return None
        return Fresh("value", "adapters.value", lora, self._value_head())

    def _value_head_on_policy(self) -> SharedWith:
        start = self.key("start.value")
        if start is None:
            return SharedWith("value", "ppo.value", head=self._value_head())
        if start == "reward":
            wrong = "is reward, an adapter of its own, and with ppo.value: shared the value role has none."
            self.problem("start.value", wrong, "Remove one of them.")
        return SharedWith("value", "start.value", start=str(start))

    def _value_head(self) -> Values:
        self.key("value_head")
        head = section(self.values, "value_head")
        return {f"head_{name}": head[name] for name in ("init", "bias") if name in head}

    def _value_on_own_base(self) -> OwnBase:
        lora, start = self._lora("value"), self.key("start.value")
        if start == "reward":
            self.problem("start.value", "is reward, whose base is not that of value_model.", "Remove one of them.")
        self._check_own_base("value_model", "value", lora)
        self._check_loop("value_model")
        if start is None:
            return replace(self._own_base("value", "value_model", "value_model", lora), head=self._value_head())
        return replace(self._own_base("value", "start.value", "value_model", lora), start=str(start))

    def _value_as_reward_model(self) -> OwnBase:
        self.key("reward")
        adapted = self._lora("reward")
        lora = self._lora("value") if adapted is None else adapted
        if self._labels() != 1:
            self.problem("start.value", "is reward, whose head has several outputs, and a value is one number.")
        self._check_loop("a copy of reward_model")
        own = self._own_base("value", "start.value", "reward_model", lora)
        return replace(own, stage="reward", adapted=adapted is not None)

    def _own_base(self, role: str, key: str, name: str, lora: Values | None) -> OwnBase:
        return OwnBase(role, key, section=name, model=section(self.values, name), lora=lora)

    # ------------------------------------------------------------------ a base of its own

    def _check_loop(self, what: str) -> None:
        if by_trl(self.values):
            self.problem("ppo.loop", f"trl runs the value role on the shared base, not on {what}.", "Use toolkit.")

    def _check_own_base(self, name: str, role: str, lora: Values | None) -> None:
        """A base of its own trains under an adapter, or whole and in float32."""
        own = section(self.values, name)
        quantized, random = own.get("quantization") is not None, own.get("config") is not None
        if lora is None and quantized:
            self.problem(f"adapters.{role}", "is missing: 4-bit weights have no gradients, and so need an adapter.")
        elif lora is None and (wrong := not_whole(own)):
            self.problem(f"{name}.dtype", wrong, f"Or give adapters.{role}.")
        elif lora is not None and random:
            self.problem(f"adapters.{role}", f"would leave random weights ({name}.config) as they are.", "Remove it.")
        if quantized and random:
            self.problem(f"{name}.quantization", "would have no effect: random weights are not quantised.")
