from types import SimpleNamespace

import torch

from tests.tiny_models import shared_base
from tests.tiny_runs import chat_recipe
from toolkit.runs.stage import banner


def test_where_it_runs_what_it_trains_and_where_it_goes(tmp_path, checkpoint):
    recipe, roles = chat_recipe(tmp_path, checkpoint), shared_base()
    args = SimpleNamespace(bf16=True, fp16=False, device=torch.device("cpu"))
    first, second = banner(recipe, "ppo", SimpleNamespace(args=args, roles=roles))
    assert first.startswith("chat ppo: CPU (") and first.endswith("; bfloat16, base in 4 bits")
    policy = sum(p.numel() for p in roles.parameters_of("policy"))
    assert second.startswith(f"trains policy ({policy:,} weights) and value (")
    assert second.endswith(f"writes to {recipe.stage_folder('ppo')}")
    roles.train_roles("policy")
    _, second = banner(recipe, "ppo", SimpleNamespace(args=args, roles=roles))
    assert "value" not in second
