from peft.tuners.lora import LoraLayer

from benchmarks import role_switch
from benchmarks.random_llama import TINY


def test_both_switches_of_a_role_come_to_the_same():
    found = []
    for switch in (role_switch.ours, role_switch.peft_s):
        roles = role_switch.base(TINY)
        switch(roles)
        layers = [module for module in roles.modules() if isinstance(module, LoraLayer)]
        found.append([(layer.active_adapters, layer.disable_adapters) for layer in layers])
        found.append([name for name, p in roles.named_parameters() if p.requires_grad])
        assert role_switch.milliseconds(switch, roles) > 0
    assert found[:2] == found[2:] and len(found[0]) == 2 * 7
