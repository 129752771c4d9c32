#!/usr/bin/env python3
"""What needs PyTorch and GPUs: the example layer (dispatch, combine and their gradients against a plain layer), the decode loop, and, where
DEEPEP_SOURCE names a source tree of DeepEP V2, its own test of the elastic buffer, unchanged, without its timing part.
Arguments go to that test (for example --masked-ratio 0.3). Exit status 77 (skipped) without PyTorch or GPUs."""
import os
import subprocess
import sys

here = os.path.dirname(os.path.abspath(__file__))
top = os.path.dirname(os.path.dirname(here))


def run(*command, **environment):
    print('+', *command, flush=True)
    return subprocess.run([sys.executable] + list(command), env=dict(os.environ, **environment)).returncode


def main(arguments):
    code = run(os.path.join(top, 'examples', 'moe_layer.py')) or run(os.path.join(top, 'examples', 'decode_graph.py'))
    source = os.environ.get('DEEPEP_SOURCE')
    if code == 0 and source:
        import torch
        package = os.path.dirname(here)
        paths = [os.path.join(package, 'nccl_ep', 'compat'), package] + \
            os.environ.get('PYTHONPATH', '').split(os.pathsep)
        count = str(min(8, torch.cuda.device_count()))
        code = run(os.path.join(source, 'tests', 'elastic', 'test_ep.py'), '--num-processes', count, '--skip-perf-test',
                   *arguments, PYTHONPATH=os.pathsep.join(p for p in paths if p))
    return code


sys.exit(main(sys.argv[1:]))
