"""What a run of a recipe does: its folder, its stages, building and checking them."""
