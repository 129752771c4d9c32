#!/usr/bin/env python3
"""An installed tree works from where it lies: programs find the library, the library finds the emulated fabric, and
licence and notice are there. Arguments: meson's command, the build folder."""
import os
import shlex
import subprocess
import sys
import tempfile

with tempfile.TemporaryDirectory(prefix='nccl_ep_install.') as root:
    env = {k: v for k, v in os.environ.items() if k not in ('LD_LIBRARY_PATH', 'NCCL_EP_EMU_MODULE')}
    subprocess.run([*shlex.split(sys.argv[1]), 'install', '--no-rebuild', '-C', sys.argv[2], '--destdir', root],
                   check=True, stdout=subprocess.DEVNULL)
    found = {}
    for folder, _, names in os.walk(root):
        found.update({name: os.path.join(folder, name) for name in names})
    for name in ('LICENSE', 'NOTICE', 'nccl_ep.h', 'nccl_ep_ext.h', 'libnccl_ep_emu.so', 'ep_bench', 'ep_demo', 'ncclEpDispatch.3'):
        if name not in found:
            sys.exit(name + ' was not installed')
    small = ['--backend', 'emu', '--topology', '1x2', '--tokens', '4', '--hidden', '64']
    for command in ([found['ep_bench'], *small, '--check'], [found['ep_demo'], *small], [found['ep_info']],
                    [found['ep_precompile'], '--help']):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd='/')
        if done.returncode:
            sys.exit(' '.join(command) + ': exit status ' + str(done.returncode) + '\n' + done.stdout)
