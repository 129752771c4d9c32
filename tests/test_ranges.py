#!/usr/bin/env python3
"""Public calls are ranges of NVTX's domain nccl_ep where a tool is attached, begun and ended in pairs, and none where no tool is. Arguments: a program
that makes calls, the tool."""
import os
import re
import subprocess
import sys

program, tool = sys.argv[1:3]


def lines(**more):
    env = {k: v for k, v in os.environ.items() if not k.startswith('NVTX_')}
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
                          env=dict(env, **more))
    found = re.findall(r'^(domain|push|pop) (\S+)(?: (\S+))?$', done.stdout, re.M)
    if done.returncode:
        sys.exit(f'FAIL: exit status {done.returncode}: {done.stdout[-600:]}')
    return found


without, found = lines(), lines(NVTX_INJECTION64_PATH=tool)
open_calls, names = [], set()
for what, domain, name in found:
    if domain != 'nccl_ep':
        sys.exit(f'FAIL: domain {domain}')
    if what == 'push':
        open_calls.append(name)
        names.add(name)
    elif what == 'pop':
        open_calls.pop()
if without or open_calls or [w for w, _, _ in found].count('domain') != 1 or 'ncclEpCreateGroup' not in names:
    sys.exit(f'FAIL: without a tool {without}; not ended {open_calls}; seen {sorted(names)}')
