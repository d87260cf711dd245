"""Shared by the whole suite: the Hypothesis profiles.

CI set in the environment   the same examples on every run, so that a red build is a changed build
otherwise                   fresh examples, and the database of past failures
VEXACT_EXAMPLES=N           examples per property (default 25): raise it to hunt
"""

import os

from hypothesis import HealthCheck, settings

COMMON = dict(
    deadline=None,  # a shared machine has no honest clock
    max_examples=int(os.environ.get("VEXACT_EXAMPLES", "25")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("ci", derandomize=True, database=None, **COMMON)
settings.register_profile("local", **COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "local")
