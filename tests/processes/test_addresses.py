"""Where processes of several machines reach one another."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest
import torch

from toolkit.processes import group


@pytest.mark.parametrize(
    ("rank", "of_other", "own"), [(0, "192.0.2.7", {"192.0.2.7": "192.0.2.1"}), (1, "", {"node1": "192.0.2.7"})]
)
def test_a_machine_is_reached_whose_name_is_at_a_loopback_address(rank, of_other, own, monkeypatch):
    """As on Debian, where gloo would listen at 127.0.1.1; the first machine knows itself by its name, and finds its
    address on the way to another one."""
    store = torch.distributed.HashStore()
    store.set(f"address {1 - rank}", of_other)
    (address,) = own.values()
    found = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth1": [SimpleNamespace(address=address)]}
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # the user's own
    monkeypatch.setattr(group, "_address_towards", lambda host: own.get(host, ""))
    monkeypatch.setattr(group, "_addresses", lambda name: ["127.0.1.1"])
    monkeypatch.setattr(group.psutil, "net_if_addrs", lambda: found)
    group.name_interface(store, rank, 2)
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "ib0"
    found_by_name = (["127.0.1.1"], "eth1"), (["198.51.100.1", "127.0.1.1"], "eth1"), ([], "eth1"), ([address], None)
    for names, interface in found_by_name:
        monkeypatch.setattr(group, "_addresses", lambda name, names=names: names)  # of a stale entry, of none
        group.name_interface(store, rank, 2)
        assert os.environ.pop("GLOO_SOCKET_IFNAME", None) == interface  # gloo finds the last by itself


def test_this_machine_s_address_on_the_way_to_another():
    assert group._address_towards("127.0.0.1") == group._address_towards("no such name") == ""
    own = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    for address in own:
        assert group._address_towards(address) == ("" if address.startswith("127.") else address)


def test_processes_of_one_machine_leave_gloo_as_it_is(monkeypatch):
    store = torch.distributed.HashStore()
    store.set("address 1", "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    group.name_interface(store, 0, 2)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
