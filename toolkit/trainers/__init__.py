"""One file a stage; the only place, with recipes, that imports TRL.

`sft` pretrains a base or trains the policy's first adapter, `reward` trains the reward role, `ppo` is our
loop in TRL's PPOTrainer, `stock_ppo` runs TRL's own loop on the shared base.
"""

from importlib.metadata import version

from toolkit.errors import ToolkitError

if not version("trl").startswith("1.12."):
    raise ToolkitError(
        f'trl {version("trl")} is installed, and PPOTrainer was removed after 1.12. Install "trl>=1.12,<1.13".'
    )
