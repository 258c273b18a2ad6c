"""The list of contracts: each has a check that exists, and the manual says the same as the code."""

from __future__ import annotations

import importlib
import re

import pytest

from trainrun.cli.manual_pages import load_topics
from trainrun.interfaces import CONTRACTS, Contract


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_the_check_of_a_contract_exists(contract: Contract) -> None:
    module, _, name = contract.check.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_manual_lists_the_contracts_of_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| (.*?) \| (.*?) \|$", load_topics()["contracts"], re.MULTILINE)
    assert rows[1:] == [(contract.name, contract.text, contract.when) for contract in CONTRACTS]
