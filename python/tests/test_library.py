"""The C interface as ctypes sees it against the headers, and how the library is found."""
import ctypes
import os
import shlex
import subprocess
import sys
import tempfile
import unittest

from nccl_ep import c_api, library, version

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Declarations(unittest.TestCase):
    def test_structs(self):
        """Size, and every field's place and size, as the C compiler lays them out."""
        lines = []
        for s in c_api.STRUCTS:
            lines.append('printf("%s %%zu\\n", sizeof(%s));' % (s.__name__, s.__name__))
            for name, *_ in s._fields_:
                lines.append('printf("%s.%s %%zu %%zu\\n", offsetof(%s, %s), sizeof(((%s *)0)->%s));'
                             % (s.__name__, name, s.__name__, name, s.__name__, name))
        with tempfile.TemporaryDirectory() as folder:
            source, program = os.path.join(folder, 'layout.c'), os.path.join(folder, 'layout')
            with open(source, 'w') as f:
                f.write('#define NCCL_EP_NO_CUDA_HEADERS\n#include <nccl_ep_ext.h>\n#include <stdio.h>\n'
                        'int main(void) {\n%s\nreturn 0;\n}\n' % '\n'.join(lines))
            subprocess.run(shlex.split(os.environ.get('CC', 'cc')) +
                           ['-I', os.path.join(TOP, 'include'), '-o', program, source], check=True)
            of_c = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        of_python = []
        for s in c_api.STRUCTS:
            of_python.append('%s %d' % (s.__name__, ctypes.sizeof(s)))
            for name, *_ in s._fields_:
                of_python.append('%s.%s %d %d' % (s.__name__, name, getattr(s, name).offset, getattr(s, name).size))
        self.assertEqual(of_python, of_c)

    def test_version(self):
        with open(os.path.join(TOP, 'python', 'pyproject.toml')) as f:
            self.assertIn('version = "%d.%d.%d"' % version(), f.read())

    def test_missing_library(self):
        """A path that is none is named, and a failed import is an ImportError, not a later surprise."""
        done = subprocess.run([sys.executable, '-c', 'import nccl_ep; nccl_ep.version()'], stderr=subprocess.PIPE,
                              text=True, env=dict(os.environ, NCCL_EP_LIBRARY='/nowhere/libnccl_ep.so'))
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r'ImportError: libnccl_ep.so was not found[\s\S]*/nowhere/libnccl_ep.so')

    def test_wrong_library(self):
        """Another library, and another release of this one."""
        with tempfile.TemporaryDirectory() as folder:
            source, other = os.path.join(folder, 'other.c'), os.path.join(folder, 'other.so')
            for text, expected in (('int other;', 'is not libnccl_ep.so: it has no ncclEpGetVersion'),
                                   ('int ncclEpGetVersion(int *v) { *v = 990000; return 0; }', r'is release 99\.0\.0: expected 0\.1')):
                with open(source, 'w') as f:
                    f.write(text)
                subprocess.run(shlex.split(os.environ.get('CC', 'cc')) + ['-shared', '-fPIC', '-o', other, source], check=True)
                done = subprocess.run([sys.executable, '-c', 'import nccl_ep; nccl_ep.version()'], stderr=subprocess.PIPE,
                                      text=True, env=dict(os.environ, NCCL_EP_LIBRARY=other))
                self.assertRegex(done.stderr, 'ImportError: .*' + expected)

    def test_errors(self):
        with self.assertRaisesRegex(library.EpError, 'ncclInvalidArgument: ncclEpGetVersion: version is NULL') as caught:
            library.call('ncclEpGetVersion', None)
        self.assertEqual(caught.exception.code, 4)


if __name__ == '__main__':
    unittest.main()
