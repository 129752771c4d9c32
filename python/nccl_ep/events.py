"""Events as DeepEP V2 has them: EventHandle marks a point of a stream, EventOverlap is what a call returns."""
import threading

from .core import Unique

thread = threading.local()  # `rank`: the emulated rank whose calls this thread makes, if it makes one's


def mark():
    """An event on the current stream, of the thread's emulated rank or of PyTorch."""
    rank = getattr(thread, 'rank', None)
    if rank is not None:
        return rank.mark(rank.current)
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not (hasattr(torch.cuda, 'is_available') and torch.cuda.is_available()):
        raise RuntimeError('there is no current stream: expected a thread that emu.run started for a rank, or PyTorch with a GPU')
    event = torch.cuda.Event()
    event.record()
    return event


class EventHandle(Unique):
    """A point of a stream: the given event, or one that is recorded on the current stream."""

    def __init__(self, event=None):
        self.event = mark() if event is None else event

    def current_stream_wait(self):
        """The current stream waits for the event; the host does not."""
        self.event.wait()


class EventOverlap(Unique):
    """The end of a dispatch or combine. `event` is None unless the call was asynchronous. Where its epilogue was deferred, the
    first wait, or complete(), runs it; before that `event` is None, too.

        with event:
            work_of_the_current_stream()   # beside the communication
        # here the current stream waits for it
    """

    def __init__(self, event=None, extra_tensors=None, epilogue=None, forgotten=None):
        if event is not None and not isinstance(event, EventHandle):
            raise TypeError('event is %s: expected an EventHandle' % type(event).__name__)
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait = None
        self._release = False
        self._forgotten = forgotten  # called where the epilogue has not run and cannot any more
        self._epilogue = epilogue  # runs it and returns its EventHandle

    def __del__(self):
        # Not completed here: that is collective, and this may be in a garbage collection or on any thread.
        if getattr(self, '_epilogue', None) is not None and self._forgotten is not None:
            self._forgotten()

    def complete(self):
        """Runs the deferred epilogue on the communication stream, if there is one and it has not run yet. Collective: in the order of
        all ranks' calls."""
        if self._epilogue is not None:
            self.event = self._epilogue()
            self._epilogue = None

    def current_stream_wait(self, release_handle=False):
        self.complete()
        if self.event is None:
            raise RuntimeError('there is no event to wait for: expected one of a call with async_with_compute_stream '
                               '(else the current stream waits already) that was not released')
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook):
        """`hook` is called once, after the next current_stream_wait()."""
        if self.hook_after_wait is not None:
            raise RuntimeError('a hook is registered already: expected at most one')
        self.hook_after_wait = hook

    def __call__(self, release_handle=False):
        self._release = release_handle
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.event is not None or self._epilogue is not None:
            self.current_stream_wait(self._release)
        self._release = False
