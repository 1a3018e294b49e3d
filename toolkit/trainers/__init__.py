"""The trainers, a file a stage; `stock_ppo` runs TRL's own loop, `common` and `resume` are what they share."""
