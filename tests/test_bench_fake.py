#!/usr/bin/env python3
"""ep_bench's way through CUDA and NCCL, on a driver and an NCCL that are none (tests/fake): every call in its place, what is
captured captures nothing that a capture forbids, and every row is there. Kernels do nothing, so nothing is checked and no
time means anything. Argument: ep_bench."""
import json
import os
import subprocess
import sys
import tempfile

folder = tempfile.mkdtemp(prefix='nccl_ep_fake.')
env = dict(os.environ, NCCL_EP_JIT_CACHE_DIR=os.path.join(folder, 'kernels'))
report = os.path.join(folder, 'report.json')
base = [sys.argv[1], '--backend', 'cuda', '--tokens', '8', '--hidden', '64', '--topk', '2', '--experts', '8', '--iters', '3',
        '--warmup', '9', '--json', report]
failed = 0


def run(rows, *options):
    """rows: (case, operation, SMs) that must be in the report, each with 3 samples, and no others."""
    global failed
    done = subprocess.run(base + list(options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, text=True,
                          env=env)
    if 'NVRTC not found' in done.stdout:
        print('skipped: no NVRTC')
        sys.exit(77)
    found = []
    if done.returncode == 0:
        with open(report) as f:
            document = json.load(f)
        found = [(r['case'], r['operation'], r['sms']) for r in document['results']]
        if document['errors'] or not all(r['samples_us'] for r in document['results']):
            found = []
    if found != rows:
        failed += 1
        print('FAIL:', ' '.join(options), '\n  exit status', done.returncode, 'rows', found, '\n ', done.stdout[-1500:])


ops = ['dispatch', 'combine']
parts = ['update', 'dispatch-cached', 'all']
for layout in 'flat', 'rank-major':
    run([('', r, 0) for r in ops + parts], '--layout', layout, '--graph', '--profile-parts')
run([('', r, 0) for r in ['host-prepare'] + ops + ['host-update', 'host-dispatch', 'host-combine', 'limit-copy-engine',
                                                   'limit-local-copy']], '--layout', 'flat', '--host-time', '--limits')
transfers = ['link-copy-engine', 'link-sm-stores', 'nccl-all-to-all']
run([(c, r, 0) for c in ('flat:8', 'rank-major:4') for r in ops + transfers], '--graph',
    '--compare=flat:8,rank-major:4')
run([('', r, n) for n in (4, 8) for r in ops], '--layout', 'flat', '--sm-curve', '4,8')
sys.exit(1 if failed else 0)
