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
        self.code, self._text = code, text

    def __reduce__(self):
        return type(self), (self.code, self._text)


def candidates():
    """Paths in the order of the search: NCCL_EP_LIBRARY, the package's folder, the build tree, the system."""
    named = os.environ.get('NCCL_EP_LIBRARY')
    if named:
        return [named]
    package = os.path.dirname(os.path.abspath(__file__))
    top = os.path.dirname(os.path.dirname(package))  # of the source tree, where this is one
    build = os.path.join(top, os.environ.get('EP_BUILD') or 'build')
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
        found = _release(path, lib)
        if found[:2] != c_api.RELEASE[:2]:
            raise ImportError('%s is release %d.%d.%d: expected %d.%d, as this package' % ((path,) + found + c_api.RELEASE[:2]))
        try:
            c_api.declare(lib)
        except AttributeError as e:
            raise ImportError('%s is older than this package: %s' % (path, e)) from None
        return lib
    raise ImportError('%s was not found: build it first (./ep build in the source tree), then set NCCL_EP_LIBRARY to the path of '
                      'build/plugin/%s, or LD_LIBRARY_PATH to its folder. Tried:\n  %s' % (FILE, FILE, '\n  '.join(tried)))


def _release(path, lib):
    """(major, minor, patch) of a library that has no prototypes yet."""
    code = ctypes.c_int()
    try:
        lib.ncclEpGetVersion(ctypes.byref(code))
    except AttributeError:
        raise ImportError('%s is not %s: it has no ncclEpGetVersion' % (path, FILE)) from None
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def call(name, *arguments):
    """Calls a function of the library; raises EpError with the library's line where it fails."""
    lib = load()
    code = getattr(lib, name)(*arguments)
    if code:
        raise EpError(code, lib.ncclEpGetLastErrorString().decode(errors='replace'))


def version():
    """The library's release, as (major, minor, patch)."""
    return _release(FILE, load())
