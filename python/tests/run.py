#!/usr/bin/env python3
"""Runs the test file named on the command line with a Python that has NumPy: this one, else the system's. Exit status 77
(skipped, for meson) where neither has it, or all tests were skipped."""
import os
import re
import subprocess
import sys

here = os.path.dirname(os.path.abspath(__file__))
for python in (sys.executable, 'python3', '/usr/bin/python3'):
    try:
        found = subprocess.run([python, '-c', 'import numpy'], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        found = False
    if found:
        break
else:
    print('no Python with NumPy: install python3-numpy')
    sys.exit(77)
paths = [os.path.dirname(here), here] + os.environ.get('PYTHONPATH', '').split(os.pathsep)
environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in paths if p), PYTHONDONTWRITEBYTECODE='1')
done = subprocess.run([python, '-m', 'unittest', 'discover', '-v', '-p', sys.argv[1]], env=environment, cwd=here, text=True,
                      stderr=subprocess.PIPE)
sys.stderr.write(done.stderr)
skipped = done.returncode == 0 and re.search(r'^Ran (\d+) tests? in .*\n\nOK \(skipped=\1\)', done.stderr, re.M)
sys.exit(77 if skipped else done.returncode)
