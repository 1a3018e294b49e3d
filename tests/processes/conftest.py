"""The second of two processes of a machine with cards."""

import os

import pytest
import torch

from toolkit.processes import launcher


def cards_in_sight(cards):
    """As CUDA counts them, of so many, by a variable that names one or none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return cards if named is None else int(named.isdecimal() and int(named) < cards)


@pytest.fixture
def two_cards(monkeypatch):
    """The second of two processes of a machine with a build for CUDA and two cards."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards_in_sight(2))
    monkeypatch.setattr(launcher, "_seen", [])
    monkeypatch.setattr(launcher, "_LAUNCHED", dict(launcher._LAUNCHED))
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
