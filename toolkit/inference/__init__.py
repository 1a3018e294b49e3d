"""What a trained run is used for: chat, generate, evaluate, export."""

NOT_READ = ("sft", "reward", "ppo", "collect", "q", "sft_data", "reward_data", "q_data", "value_head")
"""Sections that nothing reads where a run is used, but for how the stage by which it responds makes responses."""
