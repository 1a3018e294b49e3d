"""From a recipe's sections to its plan."""

from dataclasses import replace
from typing import Any

from toolkit.data import TASKS, Kind
from toolkit.errors import Problem
from toolkit.spec.keys import owner_fields
from toolkit.spec.plan import Plan, StagePlan, Values, at, scorer_parts, section
from toolkit.spec.sections import BaseSection
from toolkit.spec.sources import BaseItself, CopyOf, Fresh, FreshQ, OwnBase, Saved, SharedWith, Source, Trained
from toolkit.trainers.q_config import QConfig

# The stage that alone can read a section: without the stage it would have no effect.
_READ_BY = {
    "sft_data": "sft", "reward_data": "reward", "q_data": "q", "value_model": "ppo", "reward_model": "reward",
    "adapters.q": "q",
}  # fmt: skip
_OF_VALUE = ("adapters.value", "start.value", "value_head", "value_model")


class _Keys:
    """A recipe's keys, that remembers which were looked up."""

    def __init__(self, values: Values):
        self._values = values
        self.looked_up: set[str] = set()

    def __call__(self, key: str) -> Any:
        """What stands at a dotted key; None where there is nothing, or no section where one should be."""
        self.looked_up.add(key)
        return at(self._values, key)


def resolve(values: Values) -> Plan:
    """The plan of a recipe, whose sections may still have problems of their own."""
    return _Resolver(values).plan()


class _Resolver:
    """One recipe being resolved."""

    def __init__(self, values: Values):
        self.values = values
        self.problems: list[Problem] = []
        self.stages: dict[str, StagePlan] = {}
        self.random_base = at(values, "base.model") is None
        kinds = [(part.get("kind", "adapter"), part.get("model")) for part in scorer_parts(values).values()]
        self.scores_by_role = any(kind == "adapter" for kind, _ in kinds)
        self.scores_by_model = any(kind == "model" and model is None for kind, model in kinds)

    def problem(self, key: str, wrong: str, remedy: str = "") -> None:
        self.problems.append(Problem(wrong, key, remedy))

    def plan(self) -> Plan:
        for stage, make in (
            ("sft", self._sft),
            ("reward", self._reward),
            ("collect", self._collect),
            ("ppo", self._ppo),
            ("q", self._q),
        ):
            if stage in self.values:
                keys = _Keys(self.values)
                for key in ("seed", stage):
                    keys(key)
                made = make(keys)
                before = [self.stages[other] for other in made.needs if other in self.stages]
                needs = dict.fromkeys([*(need for other in before for need in other.needs), *made.needs])
                reads = keys.looked_up.union(*(other.reads for other in before))
                self.stages[stage] = replace(made, needs=tuple(needs), reads=frozenset(reads))
        self._check_base()
        self._check_scorer()
        self._check_effects()
        return Plan(self.stages, tuple(self.problems))

    # ------------------------------------------------------------------ the stages

    def _on_base(self, keys: _Keys) -> list[str]:
        """Stages that make the base; looks up what the base and its tokenizer come from."""
        keys("base")
        if self.random_base:
            keys("data")
        return ["sft"] if self.random_base and keys("sft") is not None else []

    def _data(self, keys: _Keys, stage: str) -> None:
        if keys(f"{stage}_data") is None:
            keys("data")

    def _sft(self, keys: _Keys) -> StagePlan:
        self._data(keys, "sft")
        keys("base")
        if self.random_base:
            keys("data")
            return StagePlan("sft", rows="demonstrations")
        policy = self._fresh(keys, "policy", "the sft stage trains it. " + self._no_full_tuning())
        return StagePlan("sft", (policy,), rows="demonstrations")

    def _no_full_tuning(self) -> str:
        why = "4-bit weights have no gradients" if at(self.values, "base.quantization") else "all roles share it"
        return f"Full fine-tuning of the base is refused: {why}"

    def _reward(self, keys: _Keys) -> StagePlan:
        self._data(keys, "reward")
        classes = (keys("reward_head.num_labels") or 1) != 1
        if classes and at(self.values, "reward.loss") == "token_level":
            wrong = "token_level is of pairs, and reward_head.num_labels says classes."
            self.problem("reward.loss", wrong, "Remove one.")
        rows: Kind = "labelled" if classes else "pairs"
        if keys("reward_model") is not None:
            keys("base")
            if self.random_base:
                keys("data")  # the tokenizer
            return StagePlan("reward", own=self._own_reward(keys), rows=rows)
        return StagePlan("reward", (self._fresh_reward(keys),), rows=rows, needs=tuple(self._on_base(keys)))

    def _collect(self, keys: _Keys) -> StagePlan:
        keys("data")
        return self._scoring("collect", keys, ())

    def _ppo(self, keys: _Keys) -> StagePlan:
        keys("data")
        start = self._policy_start(keys)
        policy = start or self._fresh(keys, "policy", "PPO trains it")
        return self._scoring("ppo", keys, (policy,))

    def _q(self, keys: _Keys) -> StagePlan:
        keys("data")
        given, collected = keys("q_data") is not None, False
        if given and "collect" in self.values:
            self.problem("collect", "would have no effect: q_data names the responses.")
        if not given:
            collected = keys("collect") is not None
            if not collected:
                wrong = "has nothing to learn from: give rated responses (q_data), or sample them (collect)."
                self.problem("q", wrong)
        q = self._fresh(keys, "q", "the q stage trains it")
        bounded = at(self.values, "q.bound") == "sigmoid"
        bound = {
            argument: section(self.values, "q").get(key, getattr(QConfig, key))
            for argument, key in (("lowest", "lowest_return"), ("highest", "highest_return"), ("scale", "bound_scale"),
                                  ("bias", "bound_bias"))
        }  # fmt: skip
        source = FreshQ("q", q.key, q.lora, bound=bound if bounded else None)
        return self._scoring("q", keys, (source,), then=("collect",) if collected else ())

    def _scoring(self, stage: str, keys: _Keys, roles: tuple[Source, ...], *, then: tuple[str, ...] = ()) -> StagePlan:
        """A stage in which responses are sampled and scored: its own roles, then reference, reward and value."""
        needs = self._on_base(keys)
        start = self._policy_start(keys)
        reference = BaseItself("reference", "base") if start is None else replace(start, role="reference")
        keys("scorer")
        missing: Problem | None = None
        sources: list[Source] = [*roles, reference]
        if self.scores_by_role:
            reward = self._saved_reward(keys)
            sources.append(reward)
            if reward.stage is not None and "reward" not in self.values:
                missing = Problem(
                    f'stage "{stage}" needs a trained reward role, and the recipe has no section "reward".',
                    remedy="Add one, name a trained adapter with start.reward=FOLDER, or score by something else "
                    "(scorer.kind).",
                )
        elif self.scores_by_model:
            needs += ["reward"] if keys("reward") is not None and keys("reward_model") is not None else []
        if stage == "ppo":
            value = self._value(keys, has_reward=self.scores_by_role)
            sources += [] if value is None else [value]
        needs += [source.stage for source in sources if source.stage is not None and source.stage in self.values]
        ordered = [name for name in ("sft", "reward") if name in needs]
        return StagePlan(stage, tuple(sources), needs=(*ordered, *then), missing=missing)

    # ------------------------------------------------------------------ the roles

    def _fresh(self, keys: _Keys, role: str, why: str) -> Fresh:
        lora = keys(f"adapters.{role}")
        if lora is None:
            self.problem(f"adapters.{role}", f"is missing: {why}.")
        return Fresh(role, f"adapters.{role}", lora if isinstance(lora, dict) else {})

    def _fresh_reward(self, keys: _Keys) -> Fresh:
        fresh = self._fresh(keys, "reward", "the reward stage trains it")
        return replace(fresh, head={"num_labels": keys("reward_head.num_labels") or 1})

    def _policy_start(self, keys: _Keys) -> Saved | Trained | None:
        """The trained adapter with which the policy starts, and which the reference is a frozen copy of."""
        folder = keys("start.policy")
        if folder:
            return Saved("policy", "start.policy", str(folder))
        if self.random_base or keys("sft") is None:
            return None
        return Trained("policy", "sft", of="sft", saved="policy", begins=self._begins("policy"))

    def _begins(self, role: str, **head: Any) -> Fresh:
        """What a stage that has not run yet will train."""
        return Fresh(role, f"adapters.{role}", section(self.values, f"adapters.{role}"), head)

    def _saved_reward(self, keys: _Keys) -> Saved | Trained:
        folder = keys("start.reward")
        if folder:
            return Saved("reward", "start.reward", str(folder))
        keys("reward")
        if "reward_model" in self.values and "ppo" in self.values and not self.scores_by_model:
            wrong = "adapter reads the reward role, and the reward stage trains reward_model."
            problem = Problem(wrong, "scorer.kind", "Use kind: model.")
            self.problems += [] if problem in self.problems else [problem]
        labels = at(self.values, "reward_head.num_labels") or 1
        return Trained(
            "reward", "reward", of="reward", saved="reward", begins=self._begins("reward", num_labels=labels)
        )

    def _value(self, keys: _Keys, *, has_reward: bool) -> Source | None:
        ppo = section(self.values, "ppo")
        if ppo.get("value", "separate") == "shared":
            return SharedWith("value", "ppo.value", head=self._value_head(keys))
        if keys("value_model") is not None:
            return self._value_on_own_base(keys, ppo)
        start, lora = keys("start.value"), at(self.values, "adapters.value")
        if start == "reward" and keys("reward_model") is not None:
            return self._value_as_reward_model(keys, ppo)
        lora = lora if isinstance(lora, dict) or lora is None else {}
        if start == "reward":
            keys("adapters.value")
            if not has_reward:
                kind = section(self.values, "scorer").get("kind", "adapter")
                self.problem("start.value", f"is reward, but with scorer.kind: {kind} there is no reward role.")
            return CopyOf("value", "start.value", lora=lora)
        if start:
            keys("adapters.value")
            return Saved("value", "start.value", str(start))
        if keys("adapters.value") is None:
            wrong = "is missing: ppo.value is separate."
            self.problem("adapters.value", wrong, "Add it, or set ppo.value to shared.")
            return None
        return Fresh("value", "adapters.value", lora or {}, self._value_head(keys))

    def _value_head(self, keys: _Keys) -> Values:
        keys("value_head")
        head = section(self.values, "value_head")
        return {f"head_{name}": head[name] for name in ("init", "bias") if name in head}

    def _value_on_own_base(self, keys: _Keys, ppo: Values) -> OwnBase:
        lora, start = keys("adapters.value"), keys("start.value")
        if start == "reward":
            self.problem("start.value", "is reward, whose base is not that of value_model.", "Remove one of them.")
        self._check_own_base("value_model", "value", lora, ppo)
        return OwnBase(
            "value", "value_model" if start is None else "start.value",
            section="value_model",
            model=section(self.values, "value_model"),
            lora=lora if isinstance(lora, dict) else None,
            head=self._value_head(keys) if start is None else {},
            start=None if start is None else str(start),
        )  # fmt: skip

    def _value_as_reward_model(self, keys: _Keys, ppo: Values) -> OwnBase:
        keys("reward")
        adapted = keys("adapters.reward")
        lora = adapted if adapted is not None else keys("adapters.value")
        if (keys("reward_head.num_labels") or 1) != 1:
            self.problem("start.value", "is reward, whose head has several outputs, and a value is one number.")
        if ppo.get("loop") == "trl":
            self._not_by_trl("a copy of reward_model")
        return OwnBase(
            "value", "start.value",
            section="reward_model",
            model=section(self.values, "reward_model"),
            lora=lora if isinstance(lora, dict) else None,
            adapted=adapted is not None,
        )  # fmt: skip

    def _own_reward(self, keys: _Keys) -> OwnBase:
        lora = keys("adapters.reward")
        self._check_own_base("reward_model", "reward", lora, {})
        return OwnBase(
            "reward", "reward_model",
            section="reward_model",
            model=section(self.values, "reward_model"),
            lora=lora if isinstance(lora, dict) else None,
            num_labels=keys("reward_head.num_labels") or 1,
        )  # fmt: skip

    # ------------------------------------------------------------------ what sections say against each other

    def _not_by_trl(self, what: str) -> None:
        self.problem("ppo.loop", f"trl runs the value role on the shared base, not on {what}.", "Use toolkit.")

    def _check_own_base(self, name: str, role: str, lora: Any, ppo: Values) -> None:
        """A base of its own trains under an adapter, or whole and in float32."""
        own = section(self.values, name)
        quantized, random = own.get("quantization") is not None, own.get("config") is not None
        if lora is None and quantized:
            self.problem(f"adapters.{role}", "is missing: 4-bit weights have no gradients, and so need an adapter.")
        elif lora is None and (dtype := own.get("dtype", BaseSection.dtype)) != "float32":
            self.problem(
                f"{name}.dtype",
                f"float32 is needed where all weights are trained, got {dtype}: small steps would round to nothing.",
                f"Or give adapters.{role}.",
            )
        elif lora is not None and random:
            self.problem(f"adapters.{role}", f"would leave random weights ({name}.config) as they are.", "Remove it.")
        if quantized and random:
            self.problem(f"{name}.quantization", "would have no effect: random weights are not quantised.")
        if ppo.get("loop") == "trl":
            self._not_by_trl(name)

    def _check_base(self) -> None:
        for name in ("base", "reward_model", "value_model"):
            own = at(self.values, name)
            if isinstance(own, dict) and (own.get("model") is None) == (own.get("config") is None):
                wrong = "exactly one of model (a checkpoint) and config (random weights) is needed."
                self.problem(name, wrong, f"Name a checkpoint with {name}.model=/path/to/checkpoint.")
        base = section(self.values, "base")
        if base.get("model") is None and base.get("config") is not None:
            if "sft" not in self.values:
                self.problem("sft", "this section is missing: a base with random weights needs pretraining.")
            task = section(self.values, "data").get("task")
            if task in TASKS and "tokenizer" in owner_fields(TASKS[task]):
                self.problem(
                    "base.config",
                    f"data.task {task} needs a checkpoint's tokenizer, and random weights have none.",
                    "Name a checkpoint with base.model=/path/to/checkpoint.",
                )

    def _check_scorer(self) -> None:
        sums = section(self.values, "scorer").get("kind") == "sum"
        if sums and at(self.values, "ppo.loop") == "trl":
            self.problem("ppo.loop", "trl scores with the reward adapter alone, not with a sum.", "Use toolkit.")
        for place, part in scorer_parts(self.values).items():
            if part.get("kind") == "model" and part.get("model") is None and "reward_model" not in self.values:
                self.problem(
                    f"{place}.model",
                    "belongs to scorer.kind: model, and is needed there (a folder or hub id).",
                    "Or add the section reward_model, for a model that the reward stage trains.",
                )

    def _check_effects(self) -> None:
        """Keys that are there and that no stage looks up."""
        for key, stage in _READ_BY.items():
            if at(self.values, key) is not None and stage not in self.values:
                remedy = "One that is trained already is named by scorer.model." if key == "reward_model" else ""
                self.problem(key, f"would have no effect: there is no section {stage}.", remedy)
        for key in _OF_VALUE if "ppo" in self.stages else ():
            if at(self.values, key) is not None and not self.stages["ppo"].reads_key(key):
                self.problem(key, f"would have no effect: {self._why_not(key)}.")

    def _why_not(self, key: str) -> str:
        """Why a key of the value role has no effect, though it is there."""
        value = self.stages["ppo"].source("value")
        if isinstance(value, SharedWith):
            return "ppo.value is shared, so value is a head on the policy's adapter"
        if key == "adapters.value":
            return "the value role starts with the adapter of the reward"
        return "the head starts as start.value says"
