"""What PPO costs on a shared base, and what it costs with stock TRL: the same rollouts, one process a contender.

`work` says what is done, `start` what all contenders start from, `contenders` builds the trainers, `loops` drives them,
`clock` times their phases, `agile` is AgileRL's in another environment, `compare` holds their losses against each
other, `floor` measures what the matmuls alone would take. `worker` is one contender in one process, `run` the whole
benchmark (`make bench`), `gpu` the one for a card (`make bench-gpu`), `summary` the arithmetic of its results,
`records` their files, `table` the docs' page. The others each answer a question, which stands at their top. Not part of
the package: it knows `toolkit`, and `toolkit` does not know it.
"""

import toolkit  # noqa: F401  (sets what its libraries read when they are first imported: no telemetry, no notices)
