"""AgileRL's `LLMPPO` on the work of the benchmark: one step of it, by the Python of an environment that has AgileRL.

    PYTHON -m benchmarks.agile about                                            its versions
    PYTHON -m benchmarks.agile compare --model FOLDER --work FILE --base nf4    its figures on one micro-batch
    PYTHON -m benchmarks.agile time    --model FOLDER --work FILE --base plain  its seconds and its memory

`run` starts these; each writes its answer as JSON to `--output`, or prints it. TRL and what reads it are not imported
here: AgileRL pins other releases of what both need.

`LLMPPO` has the adapters "actor" and "critic" on one base, and the base itself as reference. It has no reward role:
rewards come from an environment of the user's. So this contender is held against ours without a reward role, and both
are given a score of 0 for each response. Then there is nothing for the two to place differently: AgileRL pays a score
at every token of a response, we and TRL at its end.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.clock import WARM_UP, PhaseClock, gradient_norms
from benchmarks.start import MOVED, PRECISIONS, Built, Job, lora, nf4, seed_adapter, seed_head
from benchmarks.work import Work, given_responses, padding_tokenizer
from toolkit.data import pad_rows
from toolkit.models import fast_precision
from toolkit.reports import peak_memory_gb

BASES = ("plain", "nf4")
VALUE_WEIGHT, KL_WEIGHT = 0.1, 0.05  # of the losses, as TRL has them
_ROLES = {"actor": "policy", "critic": "value"}  # its names of adapters, and ours


def build(job: Job, *, quantised: bool) -> Built:
    """Its agent, with the settings that are fastest on a CPU, from the adapter and head weights of all contenders."""
    import agilerl

    # Else it binds Liger's kernels, which need a card, even where its settings switch them off.
    agilerl.HAS_LIGER_KERNEL = False
    from agilerl.algorithms.ppo_llm import PPO

    size = job.work.size
    agent = PPO(
        # The first pad token counts as a response's end: with a token of its own it would learn one more.
        pad_token_id=job.tokenizer.eos_token_id,
        pad_token=job.tokenizer.eos_token,
        model_name=job.model,
        model_config={"torch_dtype": getattr(torch, job.dtype)},
        quantization_config=nf4(job.dtype) if quantised else None,
        lora_config=lora(),
        use_separate_reference_adapter=False,
        batch_size=size.rollouts,
        mini_batch_size=size.rollouts,  # one optimizer step an epoch
        micro_batch_size_per_gpu=size.micro_batch,
        update_epochs=size.epochs,
        max_output_tokens=size.response_length,
        max_model_len=max(map(len, job.work.prompt_ids)) + size.response_length,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=None,  # 0.0, its default, goes over the vocabulary at each token to leave out nothing
        beta=KL_WEIGHT,
        vf_coef=VALUE_WEIGHT,
        lr_actor=job.learning_rate,
        lr_critic=job.learning_rate,
        max_grad_norm=None,
        fuse_actor_critic_pass=False,  # rows of both in one pass, its choice on a CPU, take a tenth to a fifth longer
        gradient_checkpointing=False,
        use_liger_loss=False,
        device="cpu",
    )
    return started(agent)


def started(agent: Any) -> Built:
    """The agent with the weights that every contender starts from, and 4-bit layers that hand gradients on."""
    for module in agent.actor.modules():
        # In a pass without gradient bitsandbytes packs their weights for such CPUs, and then hands none on.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    named = list(agent.actor.named_parameters())
    own = {adapter: [(name, p) for name, p in named if f".{adapter}." in name] for adapter in _ROLES}
    for adapter, role in _ROLES.items():
        seed_adapter(own[adapter], role, moved=MOVED)
    head = agent.actor.v_head.summary
    seed_head(head.weight, "value")
    torch.nn.init.zeros_(head.bias)  # the other contenders' heads have none
    return Built(agent, agent.actor.pretrained_model.get_base_model(), [p for _, p in own["actor"]], head.weight)


def rollout(agent: Any, work: Work) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts with responses (1, L) and masks (1, L - 1) of the tokens to be learned, as its `learn` takes them.

    Its own loop over prompts gives these too, from one row a generation; in one batch they take a fraction of the time.
    """
    ids, mask = pad_rows(work.prompt_ids, pad_token_id=agent.pad_token_id, side="left")
    found = agent.get_action([{"input_ids": ids, "attention_mask": mask}])
    (tokens,), (learned,) = found[0], found[1]
    first = (ids.shape[1] - mask.sum(1)).tolist()
    # From the first token of the prompt to the last that is learned.
    last = [int(row.nonzero().max()) + 1 for row in learned]
    rows = list(zip(first, last, strict=True))
    return (
        [tokens[i : i + 1, begin : end + 1] for i, (begin, end) in enumerate(rows)],
        [learned[i : i + 1, begin:end] for i, (begin, end) in enumerate(rows)],
    )


def run(built: Built, work: Work, clock: PhaseClock, updates: int) -> dict[str, float]:
    """Run updates as its own training loop does. Returns score, kl, entropy and the losses of the last."""
    agent, figures = built.trainer, {"score": 0.0}
    epochs, read = agent._epoch_orders, agent._fused_forward_no_grad
    reference = policy = torch.empty(0)

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.start("update")
        return epochs(*args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reference, policy
        reference, policy, values = read(*args, **kwargs)
        return reference, policy, values

    with (
        given_responses(built.generator, work),
        mock.patch.object(agent, "_epoch_orders", timed),
        mock.patch.object(agent, "_fused_forward_no_grad", noted),
    ):
        for _ in range(updates):
            clock.start("rollout")
            tokens, learned = rollout(agent, work)
            clock.start("score")
            told = agent.learn((tokens, learned, torch.zeros(len(tokens))))
            clock.stop()
            work.check([row[0, len(prompt) :].tolist() for row, prompt in zip(tokens, work.prompt_ids, strict=True)])
            figures |= {"policy_loss": told["pg_loss"], "value_loss": told["vf_loss"] / VALUE_WEIGHT}
    return figures | of_responses(reference, policy, learned)


def of_responses(reference: Tensor, policy: Tensor, learned: Iterable[Tensor]) -> dict[str, float]:
    """KL and entropy as the others tell them, each summed over a response, from log-probabilities (B, L - 1)."""
    mask = torch.zeros(policy.shape, dtype=torch.bool)
    for row, own in zip(mask, learned, strict=True):
        row[: own.shape[1]] = own[0]
    total = {"kl": policy.float() - reference.float(), "entropy": -policy.float()}
    return {name: float((each * mask).sum(1).mean()) for name, each in total.items()}


def compare(job: Job, *, quantised: bool) -> dict[str, float]:
    """Its figures and gradient norms on the work, which is one micro-batch.

    It refuses a learning rate of 0, which changes nothing here: all is of before the only step.
    """
    built = build(job, quantised=quantised)
    with gradient_norms(built) as norms:
        found = run(built, job.work, PhaseClock(), job.updates)
    return {**found, **norms}


def measure(job: Job, *, quantised: bool) -> dict[str, Any]:
    """Seconds by phase of each measured update, after a warm-up, and the peak memory of this process."""
    clock = PhaseClock()
    run(build(job, quantised=quantised), job.work, clock, job.updates)
    return {"updates": clock.updates[WARM_UP:], "memory_gb": peak_memory_gb()}


def about() -> dict[str, str]:
    """Its version and those of what it runs on."""
    return {name: version(name) for name in ("agilerl", "torch", "transformers", "peft", "bitsandbytes")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("about", "compare", "time"))
    parser.add_argument("--model")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--base", choices=BASES, default="plain")
    parser.add_argument("--dtype", choices=PRECISIONS, default=fast_precision().dtype)
    parser.add_argument("--updates", type=int, default=1, help="measured ones")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.step == "about":
        found: dict[str, Any] = about()
    else:
        work, quantised = Work.read(args.work), args.base == "nf4"
        with tempfile.TemporaryDirectory() as folder:
            given = (padding_tokenizer(args.model), Path(folder))
            if args.step == "compare":
                found = compare(Job(args.model, work.one_micro_batch(), *given, 1, args.dtype), quantised=quantised)
            else:
                found = measure(Job(args.model, work, *given, WARM_UP + args.updates, args.dtype), quantised=quantised)
    if args.output:
        args.output.write_text(json.dumps(found) + "\n", encoding="utf-8")
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
