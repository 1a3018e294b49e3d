"""What a trained run is used for: chat, generate, evaluate, export."""
