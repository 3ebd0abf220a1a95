"""Orders by name: each is planned, and naming them costs a command line nothing."""

from __future__ import annotations

import subprocess
import sys

from llmbatch.policies import ONE_ENDED, POLICIES
from tests.support.paths import ROOT


def test_every_order_walks_from_one_end_or_is_one_of_the_two_that_plan_both() -> None:
    assert set(POLICIES) == {*ONE_ENDED, "blend", "dual-scan"}


def test_the_names_of_orders_load_no_numpy() -> None:
    program = "import sys, llmbatch.policies; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"
