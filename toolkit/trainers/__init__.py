"""The trainers, a file a stage; `stock_ppo` runs TRL's own loop, `common` and `resume` are what they share."""

from importlib.metadata import version

from toolkit.errors import ToolkitError

if not version("trl").startswith("1.12."):
    wrong = f"trl {version('trl')} is installed, and PPOTrainer was removed after 1.12."
    raise ToolkitError(wrong, remedy='Install "trl>=1.12,<1.13".')
