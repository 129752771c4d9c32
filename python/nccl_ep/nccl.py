"""The few calls of NCCL that are needed where PyTorch does not tell a group's communicator."""
import ctypes

_UNIQUE_ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = [('internal', ctypes.c_byte * _UNIQUE_ID_BYTES)]


def _call(name, *arguments):
    lib = ctypes.CDLL('libnccl.so.2')  # the copy that is loaded already, if one is
    function = getattr(lib, name)
    function.restype = ctypes.c_int
    code = function(*arguments)
    if code:
        lib.ncclGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError('%s: %s' % (name, lib.ncclGetErrorString(code).decode()))


def unique_id():
    """Bytes that identify a new communicator; one rank makes them for all."""
    unique = _UniqueId()
    _call('ncclGetUniqueId', ctypes.byref(unique))
    return bytes(unique)


def init_rank(unique, size, rank):
    """The communicator's address. Collective."""
    comm = ctypes.c_void_p()
    _call('ncclCommInitRank', ctypes.byref(comm), ctypes.c_int(size), _UniqueId.from_buffer_copy(unique),
          ctypes.c_int(rank))
    return comm.value


def count(comm):
    """Ranks of a communicator."""
    ranks = ctypes.c_int()
    _call('ncclCommCount', ctypes.c_void_p(comm), ctypes.byref(ranks))
    return ranks.value


def destroy(comm):
    _call('ncclCommDestroy', ctypes.c_void_p(comm))
