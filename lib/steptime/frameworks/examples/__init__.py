"""The frameworks' own way of training LeNet, written as their tutorials write it: the adapters are compared with these.

One file a framework, run by `worker.py` in place of an adapter; `measure/example_ratio.py` times both.
"""
