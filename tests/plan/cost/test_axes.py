"""Communication of the axes: where the tokens of a mixture of experts travel."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.config import Moe
from phalanx.plan.cost.axes import visited_domains


def visited(domains: int, groups: int = 1, top_groups: int = 1) -> float:
    moe = Moe(experts=256, top_k=8, ffn=2048, groups=groups, top_groups=top_groups)
    return float(visited_domains(np.array([float(domains)]), moe)[0])


def test_a_token_meets_each_domain_once_however_many_experts_it_has_there() -> None:
    assert visited(1) == 1
    assert visited(2) == pytest.approx(2 * (1 - 0.5**8))
    assert 5 < visited(8) < 8
    assert visited(256) == pytest.approx(8, rel=0.02)


def test_groups_of_experts_bound_the_domains_of_a_token() -> None:
    deepseek = (8, 4)
    assert visited(8, *deepseek) < 4 < visited(8)
    assert visited(4, *deepseek) < visited(4)
    assert visited(32, *deepseek) == pytest.approx(visited(16))  # half of the domains are its own
    assert visited(1, *deepseek) == 1
