"""Laws, drift and times on a GPU by one command, `python -m benchmarks.gpu`; `parts.py` has the parts in their order.

It needs torch and the checkout, and no network. `--dry-run --device cpu` goes the same way in small steps on a machine
without a GPU, `--smoke` in seconds.
"""
