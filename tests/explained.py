"""Imported by the fork server only, so that asserts of test modules show their values in each rank.

pytest does this in its own process only. Here it costs 30 ms once, not in each of 700 processes.
"""

# pytest offers this only to its own process, so these two are not public.
from _pytest.assertion import install_importhook
from _pytest.config import get_config

from tests import EXPLAINED

install_importhook(get_config()).mark_rewrite(*EXPLAINED)
