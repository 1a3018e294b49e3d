"""What an update costs in memory and time, known before a weight is loaded.

`counted` runs code on tensors without numbers and counts, `outline` makes such tensors of a base with its roles,
`update` runs the phases of PPO on them and `supervised` a step of sft or reward, both by `passes`, and `devices` has
what bounds a card or this CPU.
"""

from toolkit.costs.counted import Costs, Counted, Weightless
from toolkit.costs.devices import CARDS, GRAPH_KERNEL, Device, here, named
from toolkit.costs.outline import pack, take_shape, weight_bytes_of
from toolkit.costs.passes import Phase
from toolkit.costs.supervised import SUPERVISED, counted_step
from toolkit.costs.update import PHASES, CountedUpdate, Lengths, optimizer_bytes
