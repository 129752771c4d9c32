"""Packages under the names of others. PYTHONPATH=$(python3 -m nccl_ep.compat) puts them before the originals."""
