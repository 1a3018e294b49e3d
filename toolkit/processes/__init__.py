"""Several processes that do one run: how they find each other, which rows are whose, and what they tell each other.

Libraries see one process: with their own division of rows and wrappers of modules, adapters that are switched would not
work. `launcher.py` reads what a launcher has said, `group.py` finds the others, joins and leaves, `exchange.py` is what
joined processes do.
"""

from toolkit.processes.exchange import (
    agreed,
    alone,
    by_main,
    count,
    count_here,
    first,
    gather,
    is_main,
    own,
    owner,
    rank,
    sum_,
)
from toolkit.processes.group import BY_MEMORY, INTERFACE, ON_CARDS, environment, free_port, join, leave
from toolkit.processes.launcher import launched, take_card
