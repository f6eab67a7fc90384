"""These kernels are written in the Gluon of one Triton; with another one dispatch refuses them, nothing compiles."""

import importlib.util

from flashtile.kernel import hopper

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("triton") is None or hopper._other_triton() else []
