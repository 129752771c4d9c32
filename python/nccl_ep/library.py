"""Finds and loads libnccl_ep.so on first use, and turns its error codes into exceptions."""
import ctypes
import ctypes.util
import os
import threading

from . import c_api

FILE = 'libnccl_ep.so'
_lock = threading.Lock()
_library = None


class EpError(RuntimeError):
    """A call of the library failed. `code` is its ncclResult_t; the message is the library's own line."""

    def __init__(self, code, text):
        super().__init__('%s: %s' % (c_api.RESULTS.get(code, 'error %d' % code), text))
        self.code = code


def candidates():
    """Paths in the order of the search: NCCL_EP_LIBRARY, the package's folder, the build tree, the system."""
    named = os.environ.get('NCCL_EP_LIBRARY')
    if named:
        return [named]
    package = os.path.dirname(os.path.abspath(__file__))
    top = os.path.dirname(os.path.dirname(package))  # of the source tree, where this is one
    build = os.environ.get('EP_BUILD') or os.path.join(top, 'build')
    paths = [os.path.join(package, FILE), os.path.join(package, 'lib', FILE), os.path.join(build, 'plugin', FILE)]
    return [p for p in paths if os.path.exists(p)] + [FILE + '.0', FILE]


def load():
    """The loaded library, with prototypes."""
    global _library
    with _lock:
        if _library is None:
            _library = _open()
        return _library


def _open():
    tried = []
    for path in candidates():
        try:
            lib = ctypes.CDLL(path)
        except OSError as e:
            tried.append(str(e))
            continue
        try:
            c_api.declare(lib)
        except AttributeError as e:
            raise ImportError('%s is older than this package: %s' % (path, e)) from None
        return lib
    raise ImportError('%s was not found (set NCCL_EP_LIBRARY to its path, or build the source tree):\n  %s'
                      % (FILE, '\n  '.join(tried)))


def call(name, *arguments):
    """Calls a function of the library; raises EpError with the library's line where it fails."""
    lib = load()
    code = getattr(lib, name)(*arguments)
    if code:
        raise EpError(code, lib.ncclEpGetLastErrorString().decode(errors='replace'))


def has(name):
    """Whether the library exports a function: extensions may be newer than the library that is installed."""
    return hasattr(load(), name)


def version():
    """The library's release, as (major, minor, patch)."""
    code = ctypes.c_int()
    call('ncclEpGetVersion', code)
    return code.value // 10000, code.value // 100 % 100, code.value % 100
