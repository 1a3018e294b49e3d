"""PPO with LoRA adapters for policy, value, reward and reference on one 4-bit base.

    from toolkit import recipes

    trainer = recipes.load("doubling").ppo_trainer()
    trainer.train()

The tree, from the bottom: `functional` (maths), `models`, `data` and `checkpoints`, `rewards` and `reports`,
`sampling`, `trainers`, `spec` (what a recipe says) and `costs` (what an update costs), `runs` (what a run does),
`inference` (what a trained run is used for), `recipes`, `cli`. A package imports only from those before it.
"""

import logging
import os
import sys
import warnings

# Nothing is sent anywhere unless the user asks for it. These are read when the hub library is first
# imported, so they are set before anything else of the toolkit is.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # the name of each data set, to a server of the hub's
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # that of a checkpoint without safetensors
_hub = sys.modules.get("huggingface_hub.constants")
if _hub is not None and os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1":  # imported before: it has read them already
    _hub.HF_HUB_DISABLE_TELEMETRY = True  # type: ignore[attr-defined]
_datasets = sys.modules.get("datasets.config")
if _datasets is not None and os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] == "0":
    _datasets.HF_UPDATE_DOWNLOAD_COUNTS = False  # type: ignore[attr-defined]
# TRL 1.12 has PPO in trl.experimental, and warns of all that is there.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

# Said at each start, and nothing that a user could act on: TRL 1.12 and PEFT use the older of two names of one
# setting, transformers pins memory by default, and bitsandbytes has a CPU kernel of its own.
warnings.filterwarnings("ignore", message=r"`(is_)?gradient_checkpointing(_kwargs)?` is deprecated")
warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator is found")
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.1.0"
